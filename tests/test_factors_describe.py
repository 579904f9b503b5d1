"""The whole profile of a command, over a fake installation of torch beside a real interpreter."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cachemgr.errors import CannotExecuteError, NoSuchCommandError
from cachemgr.factors import describe
from cachemgr.factors.profile import Profile
from cachemgr.key import Comparison, compare, derive

CPUINFO = "processor\t: {n}\nflags\t\t: sse sse2 avx avx2 {more}\nphysical id\t: 0\ncore id\t\t: {n}\n\n"
CONSTANT = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


class Machine:
    """A small machine on disk: an interpreter with packages, a compiler, a processor and a program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environ = {"PATH": f"{root / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(root / "site")}
        (root / "bin").mkdir(parents=True)
        (root / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
        self.torch("2.13.0+cpu")
        self.compiler("g++ 12.2.0")
        self.cpu("fma")
        self.program("import torch\n")

    def torch(self, version: str, cuda: str = "None") -> None:
        package = self.root / "site" / "torch"
        info = self.root / "site" / "torch-2.dist-info"
        package.mkdir(parents=True, exist_ok=True)
        info.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = {cuda}\nhip = None\n")
        (info / "METADATA").write_text("Name: torch\nVersion: 2\n")
        (info / "RECORD").write_text("torch/__init__.py,sha256=aa,1\n")

    def code(self, hashed: str) -> None:
        (self.root / "site" / "torch-2.dist-info" / "RECORD").write_text(f"torch/__init__.py,sha256={hashed},1\n")

    def compiler(self, version: str) -> None:
        path = self.root / "bin" / "g++"
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o755)

    def cpu(self, more: str) -> None:
        lines = [CPUINFO.format(n=n, more=more) for n in sorted(os.sched_getaffinity(0))]
        (self.root / "cpuinfo").write_text("".join(lines))

    def program(self, text: str) -> None:
        (self.root / "x.py").write_text(text)

    def describe(self, *argv: str, cwd: Path | None = None, **environ: str) -> Profile:
        return describe(
            argv or ("python", "x.py", "--n", "3"),
            {**self.environ, **environ},
            cwd=cwd or self.root,
            ignored_args=("--port",),
            cpuinfo=self.root / "cpuinfo",
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


def difference(one: Profile, other: Profile) -> list[tuple[str, str]]:
    return [(found.factor, found.role) for found in comparison(one, other).differs]


def comparison(one: Profile, other: Profile) -> Comparison:
    return compare(one.factors, other.factors)


def test_a_command_described_twice_is_exactly_itself(machine: Machine) -> None:
    assert machine.describe() == machine.describe()
    assert comparison(machine.describe(), machine.describe()).result == "exact"


def test_a_profile_says_what_people_want_to_read(machine: Machine) -> None:
    profile = machine.describe()
    assert (profile.engine, profile.engine_version, profile.model, profile.device) == (
        "torch",
        "2.13.0+cpu",
        "x.py",
        "cpu",
    )
    assert profile.command == ("python", "x.py", "--n", "3")
    assert profile.host.cpu_features == profile.needs.cpu_features == ("avx", "avx2", "fma", "sse", "sse2")


def test_every_guard_of_a_sound_machine_is_known(machine: Machine) -> None:
    assert [factor.name for factor in machine.describe().factors if factor.value is None] == []


def test_names_are_unique_and_sorted(machine: Machine) -> None:
    names = [factor.name for factor in machine.describe(TORCH_LOGS="+dynamo", CI="1", CXX="g++").factors]
    assert names == sorted(set(names))


def test_another_directory_and_path_of_the_program_is_the_same_command(machine: Machine, tmp_path: Path) -> None:
    copy = tmp_path / "other" / "renamed.py"
    copy.parent.mkdir()
    copy.write_bytes((machine.root / "x.py").read_bytes())
    elsewhere = machine.describe("python", "renamed.py", "--n", "3", cwd=copy.parent)
    assert difference(machine.describe(), elsewhere) == []
    assert difference(machine.describe(), machine.describe("python", str(copy), "--n", "3", cwd=tmp_path)) == []


def test_wrappers_do_not_change_the_command(machine: Machine) -> None:
    wrapped = machine.describe("env", "TORCH_LOGS=+dynamo", "nice", "timeout", "60", "python", "x.py", "--n", "3")
    assert difference(machine.describe(), wrapped) == []


def test_an_ignored_argument_does_not_change_the_command(machine: Machine) -> None:
    assert difference(machine.describe(), machine.describe("python", "x.py", "--n", "3", "--port", "8000")) == []


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda machine: machine.torch("2.12.1+cpu"), ("torch", "guard")),
        (lambda machine: machine.code("bb"), ("torch.code", "guard")),
        (lambda machine: machine.compiler("g++ 13.1.0"), ("compiler", "guard")),
        (lambda machine: machine.cpu("fma avx512f"), ("cpu.features", "guard")),
        (lambda machine: machine.program("import torch, sys\n"), ("program", "match")),
    ],
)
def test_a_change_is_seen_as_exactly_one_factor(
    machine: Machine, change: Callable[[Machine], None], differs: tuple[str, str]
) -> None:
    before = machine.describe()
    change(machine)
    after = machine.describe()
    assert difference(before, after) == [differs]
    assert derive(before.factors) != derive(after.factors)


def test_words_that_only_tune_a_processor_change_nothing(machine: Machine) -> None:
    before = machine.describe()
    machine.cpu("fma hypervisor prefer-no-gather erms")
    assert difference(before, machine.describe()) == []


def test_a_changed_argument_is_near(machine: Machine) -> None:
    found = comparison(machine.describe(), machine.describe("python", "x.py", "--n", "4"))
    assert [difference.factor for difference in found.differs] == ["program.args"]
    assert found.result == "near"


def test_a_changed_variable_is_near(machine: Machine) -> None:
    found = machine.describe(TORCHINDUCTOR_MAX_AUTOTUNE="1")
    assert difference(machine.describe(), found) == [("env.TORCHINDUCTOR_MAX_AUTOTUNE", "match")]


def test_another_place_of_torch_is_another_compiler_command_on_the_cpu(machine: Machine, tmp_path: Path) -> None:
    (machine.root / "site").rename(tmp_path / "moved")
    moved = machine.describe(PYTHONPATH=str(tmp_path / "moved"))
    (tmp_path / "moved").rename(machine.root / "site")
    assert difference(machine.describe(), moved) == [("prefix", "guard")]


def test_a_set_number_of_threads_replaces_the_machines(machine: Machine) -> None:
    assert difference(machine.describe(), machine.describe(OMP_NUM_THREADS="1")) == [
        ("cpu.threads", "match"),
        ("env.OMP_NUM_THREADS", "match"),
    ]


def test_precompiled_headers_are_off_on_the_cpu_and_count(machine: Machine) -> None:
    profile = machine.describe()
    assert profile.constants == {CONSTANT: "0"}
    assert [factor.value for factor in profile.factors if factor.name == f"env.{CONSTANT}"] == ["0"]


def test_the_users_choice_about_precompiled_headers_stands(machine: Machine) -> None:
    profile = machine.describe(TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="1")
    assert profile.constants == {}
    assert difference(machine.describe(), profile) == [(f"env.{CONSTANT}", "match")]


def test_inside_the_launch_the_same_factors_are_found(machine: Machine) -> None:
    inside = machine.describe(
        TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",
        TORCHINDUCTOR_CACHE_DIR="/x",
        CACHEMGR_KEY="k1:0",
        CACHEMGR_PINNED=CONSTANT,
    )
    assert difference(machine.describe(), inside) == []


def test_torch_is_not_imported(machine: Machine) -> None:
    (machine.root / "site" / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in {'torch', 'triton', 'platform', 'sysconfig', 'json'}:\n"
        f"            open({str(machine.root / 'imported')!r}, 'a').write(name)\n"
        "sys.meta_path.insert(0, Watch())\n"
    )
    assert machine.describe().engine_version == "2.13.0+cpu"
    assert not (machine.root / "imported").exists()
    assert "torch" not in sys.modules


def test_without_torch_nothing_is_reused(machine: Machine) -> None:
    profile = machine.describe(PYTHONPATH="", PATH=f"{machine.root / 'bin'}:/usr/bin:/bin")
    assert (profile.engine, profile.engine_version) == ("torch", None)
    assert comparison(profile, profile).result == "none"


def test_without_an_answering_python_the_guards_are_unknown(machine: Machine) -> None:
    python = machine.root / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    profile = machine.describe()
    unknown = {factor.name for factor in profile.factors if factor.value is None and factor.role == "guard"}
    assert {"torch", "torch.code", "triton", "python", "python.abi", "platform", "libc"} <= unknown
    assert comparison(profile, profile).result == "none"


def test_an_odd_machine_raises_nothing(machine: Machine) -> None:
    (machine.root / "cpuinfo").unlink()
    (machine.root / "site" / "torch" / "version.py").write_bytes(b"\xff\xfe__version__")
    machine.compiler("'; exit 1; '")
    assert comparison(machine.describe(), machine.describe()).result == "none"


def test_undecodable_bytes_can_be_written(machine: Machine) -> None:
    profile = machine.describe("python", "x.py", "a\udcff", TORCH_X="b\udcff", CXX="g\udcff++")
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
    derive(profile.factors)


@pytest.mark.parametrize("argv", [("nosuch", "x.py"), ("./nosuch",)])
def test_a_command_that_does_not_exist_is_said(machine: Machine, argv: tuple[str, ...]) -> None:
    with pytest.raises(NoSuchCommandError, match="nosuch"):
        machine.describe(*argv)


def test_no_command_is_said(machine: Machine) -> None:
    with pytest.raises(NoSuchCommandError):
        describe((), {}, cwd=machine.root, ignored_args=())


def test_a_command_that_may_not_be_executed_is_said(machine: Machine) -> None:
    with pytest.raises(CannotExecuteError, match=r"x\.py"):
        machine.describe("./x.py")
