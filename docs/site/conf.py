"""Sphinx's configuration of the site that `scripts/site` builds.

Pages are the repository's own Markdown, where they are, so that links between them work on a forge as well. The table
of contents is docs/README.md: its headings are the site's parts, its links their pages.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent.parent
INDEX = ROOT / "docs" / "README.md"
REPORT = "benchmarks/report/report"

project = "cachemgr"
author = "the authors of cachemgr"
release = re.search(r'__version__ = "(.+)"', (ROOT / "cachemgr" / "__init__.py").read_text())[1]
html_title = f"cachemgr {release}"
description = re.search(r'^description = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md"]
exclude_patterns = [".*", "cachemgr", "dist", "migrations", "requirements", "scripts", "site", "tests"]
myst_heading_anchors = 4  # headings have the anchors that forges give them
suppress_warnings = ["misc.highlighting_failure"]  # blocks with `…` in them are shown as they are

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "primary_sidebar_end": [],
    "footer_end": [],
}
html_sidebars = {"**": ["contents.html"]}
html_additional_pages = {"index": "to_front_page.html"}
html_context = {"description": description}
templates_path = ["."]
html_copy_source = False
html_show_sourcelink = False


def parts() -> list[tuple[str, list[str]]]:
    """Each heading of the index, with the documents below it as names of Sphinx."""
    of_headings = re.split(r"^## (.+)$", INDEX.read_text(), flags=re.MULTILINE)[1:]
    return [
        (heading, [_name(link) for link in re.findall(r"^[*-] \[.+?\]\(([^)]+\.md)\)", text, re.MULTILINE)])
        for heading, text in zip(of_headings[::2], of_headings[1::2], strict=True)
    ]


def _name(link: str) -> str:
    return str((INDEX.parent / link).resolve().relative_to(ROOT).with_suffix(""))


def with_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    """Put the table of contents into the front page, where a forge does not see it."""
    if name != root_doc:
        return
    blocks = [
        "```{toctree}\n:hidden:\n:caption: " + heading + "\n\n" + "\n".join(f"/{each}" for each in documents) + "\n```"
        for heading, documents in (("Documentation", ["docs/README"]), *parts())
    ]
    source[0] += "\n\n" + "\n\n".join(blocks) + "\n"


def with_links_to_rows(_app: Sphinx, name: str, source: list[str]) -> None:
    """Rows of the benchmarks' report have anchors in HTML, which MyST does not know: links to them are HTML as well."""
    page = "" if name == REPORT else r"(?:[\w./-]*report/)?report\.md"
    link = rf"\[((?:\\.|[^]\\])+)\]\(({page})(#[\w-]+)\)"
    source[0] = re.sub(link, lambda found: _in_html(found[1], found[2], found[3]), source[0])


def _in_html(text: str, page: str, anchor: str) -> str:
    return f'<a href="{page.removesuffix(".md")}{".html" if page else ""}{anchor}">{text}</a>'


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", with_contents)
    app.connect("source-read", with_links_to_rows)
