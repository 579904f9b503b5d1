"""Documentation holds together: links and anchors lead somewhere, and every command that is shown can be meant."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from cachemgr.cli import COMMANDS, cli
from cachemgr.factors.vllm.facts import known_versions
from cachemgr.factors.vllm.levels import GRAPH_MODES, LEVELS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
_PROMPT = re.compile(r"(?:[\w-]*\$ )?(?=cachemgr\b)")
_SHELL = {"", "console", "sh", "text"}
"""Languages of blocks that show commands."""


def prose(page: Path) -> str:
    """What a page says outside of blocks."""
    return _FENCE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a forge gives to the headings of a page, and those that it has of its own."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r'<a id="([^"]+)"></a>', prose(page)))
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|<[^>]+>", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return frozenset(found)


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link).resolve() for link in re.findall(r"^\* \[.+?\]\(([^)#]+)\)", prose(index), re.MULTILINE)
    }
    assert {*PAGES} - linked == {index, ROOT / "README.md"}
    assert linked <= {*PAGES}


def shown(page: Path) -> Iterator[str]:
    """Every command line of ours on a page: in blocks, at the beginning of a line, and in running text."""
    for _indent, language, block in _FENCE.findall(page.read_text()):
        if language in _SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                found = _PROMPT.match(line.strip())
                if found is not None and "[OPTIONS]" not in line and not line.strip().startswith("cachemgr:"):
                    yield line.strip()[found.end() :]
                yield from re.findall(r"\$\((cachemgr [^)]*)\)", line)
    for code in re.findall(r"`([^`]+)`", prose(page)):
        text = " ".join(code.split())
        if text.startswith("cachemgr "):
            yield text  # may be the beginning of a command only
        yield from re.findall(r"\$\((cachemgr [^)]*)\)", text)


def understood(line: str) -> None:
    """Parse a command line as ours would be, without doing it. It may end early, as text does.

    Raises:
        click.ClickException: it cannot be meant.
    """
    words = shlex.split(re.split(r"\s[|>&;]|\s{2,}#|\s# ", line)[0], comments=True)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="cachemgr")
    while isinstance(command, click.Group):
        parsed = command.make_parser(context).parse_args(words)[1] if words else []
        if not parsed:
            return
        found = command.get_command(context, parsed[0])
        if found is None:
            raise click.UsageError(f"there is no command `{parsed[0]}`")
        command, context, words = found, click.Context(found, parent=context, info_name=parsed[0]), parsed[1:]
    try:
        command.make_context(str(context.info_name), list(words), parent=context.parent)
    except click.MissingParameter:
        pass
    except click.BadOptionUsage as error:
        if line.rsplit(maxsplit=1)[-1] != error.option_name:
            raise


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "formats.md"], ids=lambda page: page.name)
def test_every_command_that_is_shown_can_be_meant(page: Path) -> None:
    wrong = {}
    for line in shown(page):
        try:
            understood(line)
        except click.exceptions.Exit as done:
            if done.exit_code:
                wrong[line] = "it is refused"
        except (click.ClickException, ValueError) as error:
            wrong[line] = str(error)
    assert wrong == {}


def test_a_wrong_command_would_be_noticed() -> None:
    for line in (
        "cachemgr prune --max-sice 1GB",
        "cachemgr frobnicate",
        "cachemgr config shew",
        "cachemgr ls --limit few",
    ):
        with pytest.raises(click.ClickException):
            understood(line)
    understood("cachemgr prune --max-size 1GB --dry-run")


def test_every_command_is_shown_in_a_guide() -> None:
    guides = [page for page in PAGES if page.parent == ROOT / "docs" and page.name != "reference.md"]
    lines = [line for page in guides for line in shown(page)]
    used = {word for line in lines for word in line.split() if word in COMMANDS}
    assert set(COMMANDS) - used == set()


def test_the_guide_to_vllm_knows_what_the_code_knows() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert [version for version in known_versions() if version not in page] == []
    assert [mode for mode in GRAPH_MODES if f"| `{mode}` |" not in page] == []
    assert [level for level in LEVELS if f"| `-O{level}`" not in page] == []


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md", "docs/concepts.md"])
def test_blocks_of_the_front_door_fit_into_a_terminal(page: str) -> None:
    """Real output is as wide as it is."""
    blocks = [block for _indent, _language, block in _FENCE.findall((ROOT / page).read_text())]
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("cachemgr: ")]
    assert [line for line in lines if len(line) > 80] == []
