"""Packing live units: every file is read once, and what is wrong with one shows while it is read."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cachemgr import layer, packing
from cachemgr.capture import Layer, Section
from cachemgr.digest import of_bytes
from cachemgr.domains.checks import Check, Content, not_empty
from cachemgr.domains.domain import Domain
from cachemgr.domains.triton import TRITON
from cachemgr.examine import UnfitError, contents, sketch, units_of
from cachemgr.key import derive
from cachemgr.layer import files
from cachemgr.statcache import StatCache
from cachemgr.store import Store
from cachemgr.store.captures import captures
from cachemgr.store.local import LocalStore
from tests.trees import (
    FACTORS,
    FEW,
    NOW_NS,
    build,
    changed,
    draft,
    elf,
    live,
    noise,
    publish_trees,
    tree_of,
    triton_kernel,
    write,
)

KEY = derive(FACTORS)
OTHER = changed("vllm.max_model_len", "4096")
LARGE = 17 << 20
"""More than is held of a file in memory."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each live file was opened."""
    counts: Counter[str] = Counter()
    real = layer.open_quietly

    def counted(path: str, directory: int | None = None) -> int:
        counts[path] += 1
        return real(path, directory)

    for module in (layer, files):
        monkeypatch.setattr(module, "open_quietly", counted)
    return counts


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units each attempt at a layer had."""
    attempts: list[int] = []
    real = layer.pack

    def counted(sections: Sequence[Section], source: layer.Source, target: layer.Sink) -> Layer:
        attempts.append(sum(len(section.units) for section in sections))
        return real(sections, source, target)

    monkeypatch.setattr(layer, "pack", counted)
    return attempts


def only_layer(store: Store) -> Layer:
    (capture,) = captures(store, KEY, [])
    (made,) = capture.manifest.layers
    return made


def checked_by(meddle: Callable[[Content], None]) -> Domain:
    """Triton's cache, in which something happens to a file while it is examined."""

    def check(content: Content) -> str | None:
        meddle(content)
        return not_empty(content)

    def check_of(_path: str) -> Check:
        return check

    return dataclasses.replace(TRITON, check_of=check_of)


def write_at_its_end(path: Path) -> None:
    """Change the last byte, later than the change before by the clock of the file system, which ticks slowly."""
    before = path.stat()
    while path.stat().st_mtime_ns == before.st_mtime_ns:
        with path.open("r+b") as stream:
            stream.seek(before.st_size - 1)
            stream.write(b"!")


def test_every_file_of_every_domain_is_read_once(tmp_path: Path, store: Store, opened: Counter[str]) -> None:
    published = publish_trees(store, build(tmp_path / "live"))
    assert (len(opened), set(opened.values())) == (published.files, {1})


def test_what_is_not_kept_until_it_is_packed_is_read_again(
    tmp_path: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = build(tmp_path / "live", FEW)
    stores = [LocalStore(tmp_path / name) for name in "ab"]
    publish_trees(stores[0], trees)
    monkeypatch.setattr(packing, "_KEPT_BYTES", 0)
    opened.clear()
    publish_trees(stores[1], trees)
    assert set(opened.values()) == {1, 2}
    assert only_layer(stores[0]) == only_layer(stores[1])


def test_equal_files_are_found_before_they_are_packed(tmp_path: Path, store: Store) -> None:
    """And others of the same size, and empty ones, stay apart."""
    body = noise("equal", 3000)
    names = {"K/one": body, "K/two": body, "K/other": noise("other", 3000), "K/zero": b"", "K/nil": b"", "K/x": b"x"}
    domain = dataclasses.replace(TRITON, check_of=lambda _path: lambda _content: None)
    write(tmp_path / "live", names)
    published = publish_trees(store, [tree_of(domain, tmp_path / "live")])
    assert published.refused == ()
    (section,) = only_layer(store).sections
    assert layer.links_in(section.units[0]) == {"K/two": "K/one"}


def test_a_large_file_that_is_written_to_while_it_is_read_costs_its_unit_only(tmp_path: Path, store: Store) -> None:
    good = triton_kernel(tmp_path / "live", "good")
    write(tmp_path / "live", {"K/big": noise("large", LARGE), "K/small": b"x"})

    def meddle(content: Content) -> None:
        if content.name == "big":
            write_at_its_end(tmp_path / "live/K/big")

    published = publish_trees(store, [tree_of(checked_by(meddle), tmp_path / "live")])
    assert [(row.unit, row.reason) for row in published.refused] == [("K", "`K/big` changed while it was read")]
    assert [unit.name for section in only_layer(store).sections for unit in section.units] == [good]
    assert list(store.scratch().iterdir()) == []


def test_setting_the_time_back_hides_no_change(tmp_path: Path, store: Store) -> None:
    """The time of the last change of a file's state cannot be set back, so that it shows."""
    path = tmp_path / "live/K/big"
    write(tmp_path / "live", {"K/big": noise("large", LARGE)})
    before = path.stat()

    def meddle(_content: Content) -> None:
        write_at_its_end(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    published = publish_trees(store, [tree_of(checked_by(meddle), tmp_path / "live")])
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert [row.reason for row in published.refused] == ["`K/big` changed while it was read"]


def test_what_is_captured_of_a_small_file_is_what_was_examined(tmp_path: Path, store: Store) -> None:
    """One read: what is written to it a moment later is neither in the layer nor in its digest."""
    path = tmp_path / "live/K/small"
    write(tmp_path / "live", {"K/small": b"as it was"})

    def meddle(_content: Content) -> None:
        path.write_bytes(b"as it is ")

    tree = tree_of(checked_by(meddle), tmp_path / "live")
    assert publish_trees(store, [tree]).refused == ()
    (file,) = only_layer(store).files()
    assert file.digest == of_bytes(b"as it was")


def test_a_file_whose_mode_changes_before_it_is_packed_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"K/run.so": elf("a")})
    tree = tree_of(TRITON, tmp_path)
    ((name, paths),) = units_of(TRITON, tree.seen).items()
    unit = sketch(tree, name, paths, StatCache({}), lambda _path, _body: None, now_ns=NOW_NS)
    assert unit.files[0].digest == layer.UNREAD
    (tmp_path / "K/run.so").chmod(0o755)
    with pytest.raises(UnfitError, match="changed while it was read"):
        list(contents(tree, unit.files[0]))


@pytest.mark.parametrize("damaged", [1, 5])
def test_a_layer_is_begun_again_once_however_many_units_are_damaged(
    tmp_path: Path, store: Store, packed: list[int], damaged: int
) -> None:
    keys = [triton_kernel(tmp_path / "live", f"kernel {number}") for number in range(8)]
    for key in keys[:damaged]:
        write(tmp_path / "live", {f"{key}/add_kernel.cubin": elf("cut")[:-1]})
    published = publish_trees(store, [tree_of(TRITON, tmp_path / "live")])
    assert {row.unit for row in published.refused} == set(keys[:damaged])
    assert packed == [8, 8 - damaged]
    assert {unit.name for section in only_layer(store).sections for unit in section.units} == set(keys[damaged:])
    assert list(store.scratch().iterdir()) == []


def test_a_layer_that_looks_like_a_known_one_is_not_packed_to_find_out(
    tmp_path: Path, store: Store, packed: list[int], opened: Counter[str]
) -> None:
    """On a machine whose stat cache knows nothing yet."""
    publish_trees(store, build(tmp_path / "one", FEW))
    (capture,) = captures(store, KEY, [])
    packed.clear()
    opened.clear()
    published = publish_trees(store, build(tmp_path / "two", FEW), draft(OTHER), near=(capture,))
    assert (published.stored_bytes, packed, set(opened.values())) == (0, [], {1})


def test_one_that_only_looks_like_a_known_one_is_packed(tmp_path: Path, store: Store, packed: list[int]) -> None:
    publish_trees(store, build(tmp_path / "one", FEW))
    (capture,) = captures(store, KEY, [])
    build(tmp_path / "two", FEW)
    name = next(iter((tmp_path / "two/modelinfos").glob("*.json")))
    name.write_bytes(b'{"hash": "another"}')
    published = publish_trees(store, live(tmp_path / "two"), draft(OTHER), near=(capture,))
    assert published.stored_bytes > 0
    assert len(packed) == 2
