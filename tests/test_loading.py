"""Files that run code when they are unpickled, imported or loaded: no journey and no command does that with one."""

import os
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest

from cachemgr import heal
from cachemgr.key import derive
from cachemgr.store.local import LocalStore
from cachemgr.store.removal import plan_removal, remove
from tests import trees
from tests.machines import Machine, install_stand_in
from tests.test_shapes import AOT, BACKBONE, HOST_KERNEL, KERNEL, NOW, PYTHON, ROOT, damage, look, restored


class _Trip:
    """Unpickled, it runs a command."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self._marker}'",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def tripwires(tmp_path: Path, marker: Path) -> dict[str, bytes]:
    """An Inductor directory in which every file would make the marker when it is loaded; proven to."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, built = tmp_path / "trip.c", tmp_path / "trip.so"
    source.write_text(
        f'#include <stdlib.h>\n__attribute__((constructor)) void trip(void) {{ system("touch {marker}"); }}\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(built), str(source)], check=True)
    bomb = pickle.dumps(_Trip(marker))
    wrapper, text = trees.python_module(f"open({str(marker)!r}, 'w').close()\n")
    files = dict(
        [
            (wrapper, text),
            (f"{HOST_KERNEL}.main.so", built.read_bytes()),
            trees.content_entry("aotautograd/a" + "c" * 51, bomb),
            trees.content_entry("fxgraph/kf/f" + "c" * 51, bomb),
        ]
    )
    loads = {
        "import runpy, sys; runpy.run_path(sys.argv[1])": text,
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])": built.read_bytes(),
        "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))": bomb,
    }
    for code, data in loads.items():
        (tmp_path / "loaded").write_bytes(data)
        subprocess.run([PYTHON, "-c", code, str(tmp_path / "loaded")], check=True)
        assert marker.exists(), "no tripwire"
        marker.unlink()
    return files


def test_the_commands_load_nothing_that_they_handle(tmp_path: Path, tripwires: dict[str, bytes], marker: Path) -> None:
    trees.write(tmp_path / "made", tripwires)
    variables = install_stand_in(tmp_path)
    copy = (
        "import os, shutil, sys\n"
        "root = os.environ['TORCHINDUCTOR_CACHE_DIR']\n"
        f"if not os.path.isdir(root): shutil.copytree({str(tmp_path / 'made')!r}, root)\n"
        "for top, _dirs, names in os.walk(root):\n"
        "    for name in names: open(os.path.join(top, name), 'rb').read()\n"
    )
    one, two = (Machine(tmp_path / name, tmp_path / "store", variables) for name in ("one", "two"))
    cold = one.run(PYTHON, "-c", copy)
    assert cold["added"]["inductor"] == len(tripwires)
    assert cold["published"] is not None
    warm = two.run(PYTHON, "-c", copy)
    assert (warm["result"], warm["verdict"], warm["restored_files"]) == ("exact", "used", len(tripwires))
    again = two.run(PYTHON, "-c", copy)
    assert again["present_files"] == len(tripwires), "checked in place"
    key = cold["key"]
    two.cachemgr("ls")
    two.cachemgr("show", "--files", key)
    two.json("show", key)
    two.cachemgr("size")
    two.cachemgr("lookup", "--", PYTHON, "-c", copy)
    two.cachemgr("rm", "--dry-run", key)
    two.cachemgr("rm", "-y", key)
    assert not marker.exists()


def test_no_journey_loads_what_it_handles(tmp_path: Path, tripwires: dict[str, bytes], marker: Path) -> None:
    room, store = tmp_path / "room", LocalStore(tmp_path / "store")
    trees.write(room / "inductor", tripwires)
    bomb = pickle.dumps(_Trip(marker))
    trees.write(room / "torch_compile", {f"{AOT}/rank_0_0/model": bomb, f"{BACKBONE}/artifact_x": bomb})
    index = f"__import__('os').system('touch {marker}')".encode()
    trees.write(room / "torch_compile", {"0123456789/rank_0_0/backbone/vllm_compile_cache.py": index})
    trees.write(room / "torch_compile", {f"{AOT}/inductor_cache/{path}": data for path, data in tripwires.items()})
    trees.triton_kernel(room / "triton", "one")
    trees.write(room / "triton", {f"{KERNEL}/cuda_utils.so": tripwires[f"{HOST_KERNEL}.main.so"]})
    found = look(room)
    assert {unit for _domain, unit, _why in damage(found)} == {trees.TEN_HEX, "0123456789"}
    published = trees.publish_trees(store, trees.live(room))
    assert {refused.unit for refused in published.refused} == {trees.TEN_HEX, "0123456789"}
    there = restored(store, tmp_path / "other")
    assert there[f"torch_compile/{AOT}/rank_0_0/model"] == bomb
    look(tmp_path / "other")
    for each in found:
        heal.set_aside(each, "launch-9")
    remove(store, plan_removal(store, [derive(trees.FACTORS)], now=NOW))
    assert not marker.exists()


WATCHED = r"""
import os, sys
from pathlib import Path
root = Path(sys.argv[1])
caught = []

def hook(event, arguments):
    if event in ("pickle.find_class", "ctypes.dlopen"):
        caught.append(event)
    elif event == "import" and str(arguments[1] or "").startswith(str(root)):
        caught.append(event)
    elif event == "exec" and str(root) in str(getattr(arguments[0], "co_filename", "")):
        caught.append(event)
    elif event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        caught.append(event)

from cachemgr import heal
from cachemgr.key import derive
from cachemgr.statcache import StatCache
from cachemgr.store.removal import plan_removal, remove
from cachemgr.store.local import LocalStore
from tests import trees

trees.build(root / "made")
store = LocalStore(root / "store")
bomb = b"\x80\x05cos\nsystem\n(S'true'\ntR."
for path in [*root.rglob("model"), root / "made" / "tilelang" / "autotuner" / "x" / "function.pkl"]:
    trees.write(path.parent, {path.name: bomb})
trees.write(root / "made" / "inductor", dict([trees.content_entry("fxgraph/kb/fkbomb", bomb)]))
made = trees.live(root / "made")
sys.addaudithook(hook)
caught.clear()
assert trees.publish_trees(store, made).refused == ()
assert trees.restore_found(store, trees.look_up(store), trees.targets(root / "room")).files
heal.look(trees.targets(root / "room"), StatCache({}), now_ns=trees.NOW_NS)
for each in heal.look(trees.targets(root / "made"), StatCache({}), now_ns=trees.NOW_NS):
    heal.set_aside(each, "launch-9")
remove(store, plan_removal(store, [derive(trees.FACTORS)], now=trees.NOW_NS / 1e9, grace=0))
print("caught", sorted(set(caught)))
caught.clear()
import ctypes, pickle, runpy
(root / "module.py").write_text("x = 1")
runpy.run_path(str(root / "module.py"))
for load in (lambda: pickle.loads(bomb), lambda: ctypes.CDLL(str(next(root.rglob("*.so"))))):
    try:
        load()
    except OSError:
        pass
print("control", sorted(set(caught)))
"""


def test_no_file_of_any_domain_is_loaded_by_any_journey(tmp_path: Path) -> None:
    """The interpreter itself says what is unpickled, imported, executed and opened as a library."""
    done = subprocess.run(
        [PYTHON, "-c", WATCHED, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "caught []",
        "control ['ctypes.dlopen', 'exec', 'os.system', 'pickle.find_class']",
    ]
