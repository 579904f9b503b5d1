"""docs/formats.md says what the code writes: names of objects, fields of documents, what is signed, times and sizes."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from cachemgr import digest, flight, layer, machine, signature
from cachemgr.capture import LAYOUT, File, Launch, Layer, Manifest, Observation, Section, Unit
from cachemgr.digest import Digest
from cachemgr.factors.target import Target
from cachemgr.key import Factor, derive
from cachemgr.store import captures, layout, scratch
from cachemgr.store.claims import Owner
from cachemgr.store.leases import BEAT_SECONDS, Holder
from cachemgr.store.local import LocalStore
from cachemgr.store.pins import Pin
from cachemgr.trust import Origin
from cachemgr.verified import Verified
from tests.trees import FACTORS, build, publish_trees

PAGE = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
KEY = derive(FACTORS)
CAPTURE: Digest = digest.of_bytes(b"a capture")
SIGNER, TIME = "5" * 32, "2027-01-15T08:00:00Z"

PATTERNS = {
    name: re.compile(
        re.sub("<[^>]+>", "[^/]+", re.escape(name)).replace("sha256/ab/", "sha256/[0-9a-f]{2}/").replace("…", ".+")
    )
    for name in (re.split("  +", line)[0] for line in PAGE.split("```")[1].strip().splitlines())
}
"""By what the page calls it: which objects that is."""
NAMES = {
    "a manifest": layout.manifest_name(KEY, CAPTURE),
    "a layer": layout.layer_name(CAPTURE),
    "a signature": layout.signature_name(KEY, CAPTURE, SIGNER, TIME),
    "a MAC": layout.mac_name(KEY, CAPTURE, SIGNER),
    "a note of verification": layout.verified_name(KEY, CAPTURE, TIME),
    "an origin": layout.origin_name(KEY, CAPTURE),
    "an entry": layout.entry_name("40a0994a95", KEY),
    "a near hint": layout.near_name(KEY, CAPTURE, "a" * 32, "model"),
    "a launch": layout.launch_name("2027-01-15", "20270115T080000-00000000"),
    "a server that is ready": layout.launch_name("2027-01-15", "20270115T080000-00000000.ready"),
    "several launches": layout.batch_name("2027-01-15", CAPTURE),
    "a lease": layout.lease_name(KEY, "20270115T080000-00000000"),
    "a pin": layout.pin_name(KEY, TIME),
    "a claim": layout.claim_name(KEY, 7),
    "a host's quarantine": layout.quarantine_name(CAPTURE, "host"),
    "a report": layout.report_names(KEY, CAPTURE, SIGNER, TIME)[0],
    "a report beside its manifest": layout.report_names(KEY, CAPTURE, SIGNER, TIME)[1],
    "what waits": layout.INCOMING + layout.manifest_name(KEY, CAPTURE),
    "the layout": "layout.json",
}


@pytest.mark.parametrize("what", NAMES)
def test_every_name_that_the_code_makes_is_on_the_page(what: str) -> None:
    assert [name for name, pattern in PATTERNS.items() if pattern.fullmatch(NAMES[what])]


def test_every_name_on_the_page_is_one_that_the_code_makes() -> None:
    unmade = {name for name, pattern in PATTERNS.items() if not any(map(pattern.fullmatch, NAMES.values()))}
    assert unmade == {"CACHEDIR.TAG", "tmp/", f"quarantine/<capture>/<key id>.<time>{layout.PULLED_SUFFIX}"}


def test_a_store_has_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    publish_trees(store, build(tmp_path / "live"))
    names = [entry.name for entry in store.scan("")]
    assert len(names) > 4
    assert [name for name in names if not any(pattern.fullmatch(name) for pattern in PATTERNS.values())] == []


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z_0-9]*", text))


def section(start: str) -> str:
    """From a bold word to the next paragraph that begins with one, its tables included."""
    found = re.search(rf"^{re.escape(start)}.*?(?=^\*\*|^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, start
    return found[0]


def in_code(text: str) -> set[str]:
    return {word for code in re.findall(r"`([^`]+)`", text) for word in words(code)}


def test_the_table_of_the_manifest_has_its_fields() -> None:
    rows = re.findall(r"^\| (`.+?`) \|(.+)\|$", section("**Manifest.**"), re.MULTILINE)
    named = {name for first, _rest in rows for name in words(first)}
    assert named | {"sections", "units"} == {*Manifest.__struct_fields__, "sections", "units"}
    inside: Iterable[type[msgspec.Struct]] = (Factor, Layer, Section, Unit, File)
    told = in_code(" ".join(first + rest for first, rest in rows))
    assert {name for kind in inside for name in kind.__struct_fields__} - told == set()


@pytest.mark.parametrize(
    ("start", "kinds"),
    [
        ("**Launch record**", (Launch, Observation)),
        ("**Signature.**", (signature.Signature, signature.Statement)),
        ("**Origin.**", (Origin,)),
        ("**Verified.**", (Verified,)),
        ("**Spec.**", (Target,)),
    ],
)
def test_a_paragraph_has_the_fields_of_its_document(start: str, kinds: tuple[type[msgspec.Struct], ...]) -> None:
    assert {name for kind in kinds for name in kind.__struct_fields__} - in_code(section(start)) == set()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("leases/", Holder),
        ("pins/", Pin),
        ("claims/", Owner),
        ("quarantine/<capture>/<key id>.<time>.bad", signature.SignedReport),
    ],
)
def test_small_documents_are_told_in_their_line(name: str, kind: type[msgspec.Struct]) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(name))
    assert {*re.findall(r'"(\w+)"', line)} == {*kind.__struct_fields__}


def test_what_is_signed_is_told_to_the_letter() -> None:
    said = " ".join(PAGE.split())
    for prefix in (signature._DOMAIN, signature._KEY_DOMAIN, machine._DOMAIN, machine._KEY_DOMAIN):
        assert f"`{prefix.decode().strip()}`" in said
    assert f"at most {signature.MAX_BYTES} bytes" in said


def test_times_and_sizes_are_those_of_the_code() -> None:
    said = " ".join(PAGE.split())
    assert f'{{"layout": {LAYOUT}}}' in said
    assert f"{1 << (layer.WINDOW_LOG - 20)} MiB window" in said
    assert f"for {captures.GRACE_SECONDS / 3600:.0f} hours" in said
    assert f"every {flight.BEAT_SECONDS:.0f} seconds" in said
    assert f"for {flight.SILENT_SECONDS:.0f} seconds" in said
    assert (BEAT_SECONDS, "refreshed every minute" in said) == (60, True)
    assert (scratch._ABANDONED_SECONDS, "removed after a day" in said) == (86400, True)
