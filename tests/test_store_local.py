"""The directory store: the contract, and what a directory can suffer from."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachemgr.errors import CacheError, CorruptError, DeniedError, StoreError
from cachemgr.store import Entry, Source, Store, layout
from cachemgr.store.local import LocalStore
from tests.conftest import MakeDisk
from tests.store_contract import Age, StoreContract
from tests.stores import Faulty, MemoryStore, Recording, Unreadable, contents, spool

LIMIT = 1 << 20
HERE = Path(__file__).parent


def aged(root: Path, name: str, seconds: float) -> None:
    modified = (root / name).stat().st_mtime - seconds
    os.utime(root / name, (modified, modified))


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "a store with 'quotes' and ümlauts")

    @pytest.fixture
    def age(self, store: Store) -> Age:
        return lambda name, seconds: aged(Path(str(store)), name, seconds)

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Store:
        (tmp_path / "loop").symlink_to("loop")
        return LocalStore(tmp_path / "loop" / "store")


class TestMemoryStore(StoreContract):
    """The store that other tests use must be one."""

    @pytest.fixture
    def memory(self, tmp_path: Path) -> MemoryStore:
        return MemoryStore(tmp_path / "scratch")

    @pytest.fixture
    def store(self, memory: MemoryStore) -> Store:
        return Recording(memory)

    @pytest.fixture
    def age(self, memory: MemoryStore) -> Age:
        return lambda name, seconds: age_in_memory(memory, name, seconds)

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Store:
        return Broken(MemoryStore(tmp_path / "scratch"), "")


def age_in_memory(store: MemoryStore, name: str, seconds: float) -> None:
    entry = next(entry for entry in store.scan("") if entry.name == name)
    assert store.set_modified(name, entry.modified - seconds)


class Broken(Unreadable):
    """Nothing works any more."""

    def has(self, name: str) -> bool:
        self._check(name)
        return super().has(name)

    def put(self, name: str, data: bytes) -> bool:
        self._check(name)
        return super().put(name, data)

    def put_file(self, name: str, path: Path) -> bool:
        self._check(name)
        return super().put_file(name, path)

    def put_stream(self, name: str, source: Source) -> bool:
        self._check(name)
        return super().put_stream(name, source)

    def refresh(self, name: str) -> bool:
        self._check(name)
        return super().refresh(name)

    def delete(self, name: str) -> bool:
        self._check(name)
        return super().delete(name)

    def scan(self, prefix: str) -> Iterator[Entry]:
        self._check(prefix)
        return super().scan(prefix)


def python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A process that runs `code` with this package and these tests at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={"PYTHONPATH": f"{HERE}:{HERE.parent}", "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: "subprocess.Popen[str]") -> str:
    out, _none = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return out.strip()


def test_of_many_processes_one_wins_and_the_bytes_are_whole(tmp_path: Path) -> None:
    code = """
    import sys, time
    from pathlib import Path
    from cachemgr.store.local import LocalStore
    root, number = Path(sys.argv[1]), int(sys.argv[2])
    while not (root.parent / "go").exists():
        time.sleep(0.001)
    print(LocalStore(root).put("a/b", bytes([number]) * 500_000))
    """
    racers = [python(code, str(tmp_path / "store"), str(number)) for number in range(6)]
    time.sleep(0.3)
    (tmp_path / "go").touch()
    results = [answer(racer) for racer in racers]
    assert sorted(results) == ["False"] * 5 + ["True"]
    data = LocalStore(tmp_path / "store").read("a/b", limit=LIMIT)
    assert data == bytes([results.index("True")]) * 500_000
    assert list((tmp_path / "store" / "tmp").glob("*/*")) == []


def test_a_process_killed_while_it_writes_leaves_only_the_scratch_directory(tmp_path: Path) -> None:
    code = """
    import sys
    from pathlib import Path
    from cachemgr.store.local import LocalStore
    store = LocalStore(Path(sys.argv[1]))
    number = 0
    print("ready", flush=True)
    while True:
        store.put(f"a/{number % 7}/{number}", number.to_bytes(8, "big") * 40_000)
        number += 1
    """
    root = tmp_path / "store"
    store = LocalStore(root)
    for pause in (0.05, 0.083, 0.111, 0.137):
        writer = python(code, str(root))
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(pause)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        for entry in store.scan(""):
            number = int(entry.name.rsplit("/", 1)[-1])
            assert store.read(entry.name, limit=LIMIT) == number.to_bytes(8, "big") * 40_000
        assert {path.name for path in root.iterdir()} <= {"a", "tmp"}
        shutil.rmtree(root)


NO_LINKS = """
import sys
from pathlib import Path
from tests.stores import contents, deny_hard_links, spool
from cachemgr.store import layout
from cachemgr.store.local import LocalStore
if not deny_hard_links():
    print("cannot")
    raise SystemExit
store = LocalStore(Path(sys.argv[1]))
assert store.put("a/b", b"first") is True
assert store.put("a/b", b"second") is False
assert store.put_file("a/b", spool(store, b"third")) is False
assert store.put_file("a/c", spool(store, b"fourth")) is True
assert contents(store) == {"a/b": b"first", "a/c": b"fourth"}
assert list(store.scratch().iterdir()) == []
assert layout.ensure_layout(store) == layout.ensure_layout(store)
print("done")
"""


def test_a_file_system_without_hard_links_will_do(tmp_path: Path) -> None:
    if answer(python(NO_LINKS, str(tmp_path / "store"))) == "cannot":
        pytest.skip("this kernel does not let a process give up its hard links")


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user may enter; `tmp_path` is private."""
    made = Path(tempfile.mkdtemp(prefix="cachemgr-test-"))
    made.chmod(0o755)
    yield made
    for path in [made, *made.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(made)


def as_nobody(work: Callable[[], str]) -> str:
    """What `work` says in a process that may not write everywhere; root has to become somebody else for that."""
    if os.geteuid() != 0:
        return work()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def test_permissions_are_failures_and_not_absences(public: Path) -> None:
    root = public / "store"
    store = LocalStore(root)
    for name in ("a/open", "a/closed", "shut/inside"):
        store.put(name, b"1")
    (root / "a/closed").chmod(0)
    for path, mode in ((root / "shut", 0), (root / "a", 0o555), (root, 0o555)):
        path.chmod(mode)
    attempts: list[Callable[[], object]] = [
        lambda: store.put("a/new", b"x"),
        lambda: store.put("a/open", b"x"),
        lambda: store.delete("a/open"),
        lambda: store.read("a/closed", limit=10),
        lambda: store.read("shut/inside", limit=10),
        lambda: store.has("shut/inside"),
        lambda: list(store.scan("shut/")),
    ]

    def outcomes() -> str:
        said = [store.read("a/open", limit=10).decode()]
        for attempt in attempts:
            try:
                said.append(f"no error: {attempt()}")
            except CacheError as error:
                said.append(f"{type(error).__name__}: {error.hint}")
        return "\n".join(said)

    writable = f"StoreError: make {root} writable for this user, or set CACHEMGR_STORE to a directory that is"
    readable = f"DeniedError: make {root} readable for this user"
    # Its owner can write aside, and finds the name taken.
    taken = writable if os.geteuid() == 0 else "no error: False"
    assert issubclass(DeniedError, StoreError)
    assert as_nobody(outcomes).splitlines() == ["1", writable, taken, writable, *[readable] * 4]
    (root / "shut").chmod(0o755)
    (root / "a/closed").chmod(0o644)
    assert set(contents(store)) == {"a/open", "a/closed", "shut/inside"}
    assert list((root / "tmp").glob("*/*")) == []


def test_a_full_disk_leaves_nothing_and_says_what_to_do(small_disk: MakeDisk) -> None:
    root = small_disk(256 << 10) / "store"
    store = LocalStore(root)
    store.put("small", b"1")
    for _again in range(2):
        with pytest.raises(StoreError, match="No space left") as caught:
            store.put("a/big", bytes(1 << 20))
        assert caught.value.hint is not None
        assert "free space" in caught.value.hint
    assert contents(store) == {"small": b"1"}
    assert list((root / "tmp").glob("*/*")) == []
    assert store.put("a/small", b"2") is True


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = LocalStore(root)
    assert not store.has("a")
    assert list(store.scan("")) == []
    assert layout.read_layout(store) is None
    assert not root.exists()
    store.put("a", b"")
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_is_no_object(tmp_path: Path, store: Store) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put("a/real", b"1")
    root = Path(str(store))
    (root / "a/link").symlink_to(outside / "secret")
    (root / "a/dir").symlink_to(outside)
    assert store.has("a/link") is False
    with pytest.raises(CacheError):
        store.read("a/link", limit=LIMIT)
    assert [entry.name for entry in store.scan("a/")] == ["a/real"]
    with pytest.raises(StoreError, match="something that is no file is in the way"):
        store.put("a/link", b"x")
    assert (outside / "secret").read_bytes() == b"secret"
    assert store.delete("a/link") is True
    assert (outside / "secret").exists()


def test_a_pipe_in_the_place_of_an_object_does_not_make_us_wait(store: Store) -> None:
    store.put("a/real", b"1")
    os.mkfifo(Path(str(store)) / "a/pipe")
    assert store.has("a/pipe") is False
    failures = []

    def attempt() -> None:
        try:
            store.read("a/pipe", limit=LIMIT)
        except CacheError as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert [entry.name for entry in store.scan("")] == ["a/real"]


@pytest.mark.parametrize("kind", ["directory", "full directory", "pipe", "dangling link"])
@pytest.mark.parametrize("links", [True, False])
def test_what_is_no_file_is_no_object_that_somebody_wrote_before(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: str, links: bool
) -> None:
    place = Path(str(store)) / "a/b"
    place.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "dangling link":
        place.symlink_to("nowhere")
    else:
        place.mkdir()
        (place / "c" if kind == "full directory" else place.parent / "c").touch()
    if not links:
        monkeypatch.setattr(os, "link", _refused)
    with pytest.raises(StoreError, match="something that is no file is in the way") as raised:
        store.put("a/b", b"1")
    assert raised.value.hint == f"remove {place}"
    assert store.has("a/b") is False
    if "directory" in kind:
        with pytest.raises(StoreError, match="something that is no file is in the way"):
            store.delete("a/b")
    else:
        assert store.delete("a/b")
        assert store.put("a/b", b"1")


def _refused(*_given: object, **_options: object) -> None:
    raise PermissionError(errno.EPERM, "no links here")


def test_deleting_the_last_object_removes_its_directories_and_no_more(store: Store) -> None:
    store.put("a/b/c/1", b"")
    store.put("a/2", b"")
    store.delete("a/b/c/1")
    root = Path(str(store))
    assert not (root / "a/b").exists()
    store.delete("a/2")
    assert not (root / "a").exists()
    assert root.exists()


def test_what_nfs_leaves_behind_is_not_listed(store: Store) -> None:
    store.put("a/1", b"")
    (Path(str(store)) / "a/.nfs0000000000000001").write_bytes(b"deleted and still open")
    assert [entry.name for entry in store.scan("")] == ["a/1"]


def test_what_cannot_be_the_name_of_an_object_is_not_listed(store: Store) -> None:
    store.put("a/1", b"")
    for name in (b"a line\n", b"\xff", b"\x1b[31m", b"back\\slash"):
        (Path(str(store)) / "a" / os.fsdecode(name)).write_bytes(b"")
        (Path(str(store)) / os.fsdecode(name)).mkdir()
        (Path(str(store)) / os.fsdecode(name) / "1").write_bytes(b"")
    assert [entry.name for entry in store.scan("")] == ["a/1"]


def test_a_new_store_is_marked_as_a_cache_and_knows_its_layout(store: Store) -> None:
    made = layout.ensure_layout(store)
    root = Path(str(store))
    assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert (root / "layout.json").read_bytes() == b'{"layout":1}'
    assert layout.ensure_layout(store) == made == layout.read_layout(store)


def test_of_many_makers_of_one_store_none_fails(tmp_path: Path) -> None:
    for number in range(5):
        root = tmp_path / str(number)
        barrier = threading.Barrier(6)

        def make(_number: int, root: Path = root, barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            return layout.ensure_layout(LocalStore(root)).layout

        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(make, range(6))) == {1}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"layout":2,"salt":"00","new":[1]}', "layout 2, this cachemgr reads layout 1"),
        (b'{"layout":0,"salt":"00"}', "layout 0, this cachemgr reads layout 1"),
        (b"", "no cachemgr store"),
        (b"{", "no cachemgr store"),
        (b'{"layout":"1"}', "no cachemgr store"),
        (b"\xff\xfe", "no cachemgr store"),
        (b"[" * 50_000, "no cachemgr store"),
        (b'{"imageLayoutVersion": "1.0.0"}', "no cachemgr store"),
    ],
)
def test_another_layout_is_refused_and_never_stamped_again(store: Store, data: bytes, words: str) -> None:
    store.put("layout.json", data)
    for attempt in (layout.read_layout, layout.ensure_layout):
        with pytest.raises(CorruptError, match=words) as caught:
            attempt(store)
        assert caught.value.hint
    assert contents(store) == {"layout.json": data}


@pytest.mark.parametrize("data", [b"", bytes(12)])
def test_a_layout_that_a_power_cut_emptied_can_be_made_anew(store: Store, data: bytes) -> None:
    layout.ensure_layout(store)
    place = Path(str(store)) / "layout.json"
    place.write_bytes(data)
    with pytest.raises(CorruptError) as raised:
        layout.ensure_layout(store)
    assert f"remove {place}, which is empty" in (raised.value.hint or "")
    place.unlink()
    assert layout.ensure_layout(store).layout == 1


def test_a_huge_layout_file_is_not_read_into_memory(store: Store) -> None:
    store.put("layout.json", b" " * (1 << 20))
    with pytest.raises(CorruptError, match="more than"):
        layout.read_layout(store)


def test_a_store_that_forgets_is_noticed(tmp_path: Path) -> None:
    class Forgetful(MemoryStore):
        def put(self, name: str, data: bytes) -> bool:
            return True

    with pytest.raises(CorruptError, match="does not keep"):
        layout.ensure_layout(Forgetful(tmp_path))


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        layout.ensure_layout(Faulty(MemoryStore(tmp_path), fail_after=0))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        layout.ensure_layout(LocalStore(tmp_path / "file" / "store"))


def test_scratch_is_on_the_file_system_of_the_store(store: Store) -> None:
    assert store.scratch().stat().st_dev == Path(str(store)).stat().st_dev
    assert spool(store, b"x").stat().st_mode & 0o777 == 0o644
    assert store.scratch().stat().st_mode & 0o777 == 0o700


def test_what_killed_writers_left_goes_when_it_is_old(tmp_path: Path, store: Store) -> None:
    left = {name: store.scratch() / name for name in ("old", "young")}
    (tmp_path / "elsewhere").write_bytes(b"somebody's")
    link = store.scratch() / "link"
    for path in left.values():
        path.write_bytes(b"half")
    link.symlink_to(tmp_path / "elsewhere")
    os.utime(left["old"], (1, 1))
    os.utime(link, (1, 1), follow_symlinks=False)
    store.put("a", b"1")
    assert sorted(path.name for path in store.scratch().iterdir()) == ["link", "young"]
    assert (tmp_path / "elsewhere").read_bytes() == b"somebody's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_who_may_enter_a_store_may_read_it_whatever_the_umask_of_a_writer_is(public: Path, umask: int) -> None:
    root = public / "store"
    root.mkdir()
    root.chmod(0o755)
    store = LocalStore(root)
    before = os.umask(umask)
    try:
        store.put("layers/sha256/ab/x", b"1")
        store.put_file("artifacts/y", spool(store, b"2"))
    finally:
        os.umask(before)
    assert as_nobody(lambda: str(sorted(contents(store)))) == "['artifacts/y', 'layers/sha256/ab/x']"
    modes = {path.stat().st_mode & 0o7777 for path in root.rglob("*") if "tmp" not in path.parts[len(root.parts) :]}
    assert modes == {0o644, 0o755}
    assert (root / "tmp" / "0").stat().st_mode & 0o7777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_where_the_group_of_a_store_may_write_its_members_publish_beside_each_other(public: Path) -> None:
    root = public / "store"
    root.mkdir()
    os.chown(root, 0, 65534)
    root.chmod(0o2775)
    store = LocalStore(root)
    assert store.put("layers/sha256/ab/x", b"1")
    assert as_nobody(lambda: str(store.put("layers/sha256/ab/y", b"2"))) == "True"
    assert contents(store) == {"layers/sha256/ab/x": b"1", "layers/sha256/ab/y": b"2"}
    assert not any(path.stat().st_mode & 0o002 for path in root.rglob("*"))
