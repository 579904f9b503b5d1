"""The page in a real browser: searched, opened, previewed, dark, without scripts, by keyboard and by screen reader."""

import os
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn

from cachemgr.clock import written
from cachemgr.key import derive
from cachemgr.store import records
from tests.browser import Browser
from tests.browser import started as browser_started
from tests.serving import local_replica, started, store_of
from tests.test_catalogue import stocked
from tests.trees import changed

PICTURES = os.environ.get("CACHEMGR_TEST_PICTURES")
"""Where screenshots are kept, for people to look at."""
PATHS = ("/", "/artifacts", "/launches", "/prune?keep_last=1", "/health", "/v1")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a service with a month of launches."""
    root = tmp_path_factory.mktemp("site")
    store = store_of(root)
    first, second = stocked(store, root / "trees", "4096", "8192")
    phases = {"init_engine": 12.5, "load_weights": 6.0, "run": 30.0}
    now = time.time()
    for day in range(28):
        for number, verdict in enumerate(("used", "used", "cold") if day % 3 else ("partly used", "inert")):
            warm = verdict != "cold"
            launch = started(
                f"{day:02}-{number}",
                started=written(now - day * 86400 - 60 * number),
                host=f"node-{number}",
                artifact=first if warm else second,
                result="exact" if warm else "near",
                verdict=verdict,
                factors=() if warm else changed("vllm.max_model_len", "1"),
                phases={**phases, "init_engine": 12.5 + 30 * (not warm)},
                differs=() if warm else started("x").differs,
            )
            records.record(store, launch if warm else msgspec.structs.replace(launch, key=derive(launch.factors)))
    made = local_replica(root, open_to_loopback=True)
    config = uvicorn.Config(made.client.app, host="127.0.0.1", port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    made.backend.catalogue.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser_started() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    chromium.scripts(allowed=True)
    chromium.appearance("light")
    chromium.failures.clear()
    chromium.asked.clear()
    return chromium


def kept(browser: Browser, name: str, tmp_path: Path) -> bytes:
    return browser.picture(Path(PICTURES or tmp_path) / f"{name}.png")


def test_an_operator_finds_an_artifact_and_why_a_start_was_cold(browser: Browser, site: str, tmp_path: Path) -> None:
    browser.open(f"{site}/")
    assert "Hit rate" in browser.run("document.body.innerText")
    assert browser.run("document.querySelectorAll('svg.chart rect').length") > 20
    kept(browser, "fleet", tmp_path)
    browser.open(f"{site}/artifacts")
    assert browser.run("document.querySelectorAll('tbody tr').length") == 2
    browser.type("#search", "nothing-like-it")
    browser.submit("#search")
    assert "No artifact is like this" in browser.html()
    browser.open(f"{site}/artifacts?search=lla&complete=yes")
    kept(browser, "artifacts", tmp_path)
    browser.open(site + browser.run("document.querySelector('tbody a').getAttribute('href')"))
    text = browser.run("document.body.innerText")
    for heading in ("Factors", "Captures and layers", "Neighbours", "History"):
        assert heading in text
    assert "vllm.max_model_len: 8192 ≠ 4096 (match)" in text
    kept(browser, "artifact", tmp_path)
    browser.open(f"{site}/launches?verdict=cold")
    kept(browser, "launches", tmp_path)
    browser.open(site + browser.run("document.querySelector('tbody a').getAttribute('href')"))
    assert "What differs" in browser.run("document.body.innerText")
    kept(browser, "launch", tmp_path)
    assert browser.failures == []


def test_a_prune_is_previewed_and_nothing_goes(browser: Browser, site: str, tmp_path: Path) -> None:
    browser.open(f"{site}/prune")
    browser.type("#keep_last", "1")
    browser.submit("#keep_last")
    assert "Artifacts that would go" in browser.html()
    kept(browser, "prune", tmp_path)
    browser.open(f"{site}/prune?max_size=much")
    assert browser.run("document.querySelector('[role=alert]').innerText").startswith("a limit cannot be read")
    browser.open(f"{site}/artifacts")
    assert browser.run("document.querySelectorAll('tbody tr').length") == 2


@pytest.mark.parametrize("path", PATHS)
def test_every_page_reads_without_scripts_and_loads_nothing_from_elsewhere(
    browser: Browser, site: str, path: str
) -> None:
    browser.scripts(allowed=False)
    browser.open(site + path)
    assert "<h1>" in browser.html()
    assert "<script" not in browser.html()
    assert {url.partition("/static")[0] for url in browser.asked} <= {site + path, site}
    assert browser.failures == []


def test_it_is_dark_where_that_is_wanted(browser: Browser, site: str, tmp_path: Path) -> None:
    for scheme in ("light", "dark"):
        browser.appearance(scheme)
        browser.open(f"{site}/")
        kept(browser, scheme, tmp_path)
        red = int(browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
        assert (red < 64) == (scheme == "dark")


def test_a_phone_scrolls_tables_and_not_the_page(browser: Browser, site: str, tmp_path: Path) -> None:
    browser.appearance("light", width=390)
    for path in PATHS:
        browser.open(site + path)
        assert browser.run("document.documentElement.scrollWidth") <= 390, path
    browser.open(f"{site}/launches")
    kept(browser, "phone", tmp_path)


CONTRAST = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [.2126, .7152, .0722][at], 0);
  const behind = node => { for (; node; node = node.parentElement) {
    const color = rgb(getComputedStyle(node).backgroundColor); if (color.length < 4 || color[3] > 0) return color; }
    return [255, 255, 255]; };
  const poor = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || node.closest('svg')) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) poor.add(node.tagName + ' ' + node.className);
  }
  return [...poor];
})()
"""
FAULTS = """
(() => {
  const faults = [];
  const all = selector => [...document.querySelectorAll(selector)];
  if (!document.documentElement.lang) faults.push('no language');
  if (all('h1').length !== 1 || all('main').length !== 1) faults.push('not one h1 and one main');
  for (const each of all('input, select'))
    if (!document.querySelector(`label[for="${each.id}"]`)) faults.push('no label: ' + each.name);
  for (const each of all('table')) if (!each.caption) faults.push('a table without caption');
  for (const each of all('th')) if (!each.scope) faults.push('th without scope: ' + each.innerText);
  for (const each of all('svg'))
    if (each.getAttribute('role') !== 'img' || !each.getAttribute('aria-label')) faults.push('svg without name');
  const ids = all('[id]').map(each => each.id);
  if (new Set(ids).size !== ids.length) faults.push('an id twice');
  for (const each of all('[aria-labelledby]'))
    if (!document.getElementById(each.getAttribute('aria-labelledby'))) faults.push('a name that is not there');
  let level = 1;
  for (const each of all('h1, h2, h3')) {
    const now = +each.tagName[1];
    if (now > level + 1) faults.push('a heading is skipped');
    level = now;
  }
  return faults;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", [*PATHS, "/launches/01-2", "/artifacts/k1:"])
def test_pages_can_be_read_by_everybody(browser: Browser, site: str, path: str, scheme: str) -> None:
    """Contrast of WCAG AA, structure, and a name for everything that can be used."""
    if path == "/artifacts/k1:":
        browser.open(f"{site}/artifacts")
        path = str(browser.run("document.querySelector('tbody a').getAttribute('href')"))
    browser.appearance(scheme)
    browser.open(site + path)
    assert browser.run(CONTRAST) == []
    assert browser.run(FAULTS) == []
    usable = {
        "link",
        "button",
        "textbox",
        "searchbox",
        "combobox",
        "image",
        "img",
        "table",
        "form",
        "search",
        "navigation",
    }
    told: list[tuple[str, Any]] = [each for each in browser.accessible() if each[0] in usable]
    assert len(told) > 5
    assert [each for each in told if not each[1]] == []


AXE = """
axe.run(document, {resultTypes: ['violations'], runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})
  .then(told => told.violations.map(each => `${each.id}: ${each.nodes.map(node => node.html).join(' ')}`))
"""


def test_axe_finds_nothing(browser: Browser, site: str) -> None:
    """The rules of axe-core for WCAG 2.1 AA, and its best practices."""
    pytest.importorskip("axe_core_python")
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text()
    browser.open(f"{site}/artifacts")
    one = str(browser.run("document.querySelector('tbody a').getAttribute('href')"))
    for scheme in ("light", "dark"):
        browser.appearance(scheme)
        for path in (*PATHS, "/launches/01-2", one, "/artifacts/nothing"):
            browser.open(site + path)
            browser.run(f"{axe}; undefined")
            assert browser.run(AXE) == [], f"{path}, {scheme}"
    browser.run("document.documentElement.removeAttribute('lang')")
    assert [each.partition(":")[0] for each in browser.run(AXE)] == ["html-has-lang"], "it finds what there is"


def test_a_keyboard_reaches_the_content_first_and_shows_where_it_is(browser: Browser, site: str) -> None:
    browser.open(f"{site}/artifacts")
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    assert browser.run("document.activeElement.getBoundingClientRect().left") >= 0, "it shows when it has the focus"
    reached = []
    for _press in range(12):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id || document.activeElement.innerText"))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert [name for name in reached if name in {"search", "device", "engine_version", "complete", "Search"}] == [
        "search",
        "device",
        "engine_version",
        "complete",
        "Search",
    ]
