"""Finding the Python of a command, and hearing from it what it is."""

import os
import sys
import time
from pathlib import Path

import pytest

from cachemgr import executables
from cachemgr.errors import CannotExecuteError, NoSuchCommandError
from cachemgr.factors import interpreter, packages
from cachemgr.factors.wrappers import unwrap

PYTHON = os.path.realpath(sys.executable)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_python(folder: Path, name: str = "python") -> Path:
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    path.symlink_to(PYTHON)
    return path


def launcher(cwd: Path, *argv: str, path: str = "") -> tuple[str, ...] | None:
    return interpreter.launcher(unwrap(argv, {"PATH": path}), cwd)


def ask(cwd: Path, *argv: str, **environ: str) -> interpreter.Interpreter | None:
    return interpreter.ask(argv, (), unwrap(argv, environ), cwd)


def test_a_python_is_itself(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin", "python3.12")
    assert launcher(tmp_path, str(python), "x.py") == (str(python),)


def test_a_python_is_looked_up_on_the_path_of_the_command(tmp_path: Path) -> None:
    first, second = fake_python(tmp_path / "a"), fake_python(tmp_path / "b")
    assert launcher(tmp_path, "python", "x.py", path=f"{first.parent}:{second.parent}") == (str(first),)
    assert launcher(tmp_path, "python", "x.py", path=f"{second.parent}:{first.parent}") == (str(second),)


@pytest.mark.parametrize(
    "prefix",
    [
        "env A=1 B=2",
        "env -u A -i",
        "env -S A=1",
        "nice",
        "nice -n 5",
        "nice -5",
        "nohup",
        "timeout 10",
        "timeout -k 5 -s TERM 10m",
        "timeout --signal=KILL --foreground 10",
        "stdbuf -oL -e 0",
        "setsid -w",
        "taskset -c 0-3",
        "taskset 0x3",
        "numactl --cpunodebind=0 -m 0",
        "numactl -N 0 --localalloc",
        "time -p",
        "ionice -c 2 -n 0",
        "ionice -c3 -t",
        "chrt --fifo 10",
        "tini -g -- ",
        "dumb-init -c",
        "docker-init -p SIGTERM --",
        "env A=1 nice timeout 5 stdbuf -o0",
    ],
)
def test_wrappers_are_looked_through(tmp_path: Path, prefix: str) -> None:
    python = fake_python(tmp_path / "bin")
    command = unwrap([*prefix.split(), str(python), "x.py"], {})
    assert command.argv == (str(python), "x.py")


@pytest.mark.parametrize(
    "prefix", ["taskset -p 12", "timeout --what 5", "env -C /", "numactl --hardware", "nice", "ionice -p 1"]
)
def test_wrappers_that_are_not_understood_are_left_alone(prefix: str) -> None:
    assert unwrap(prefix.split(), {}).argv == tuple(prefix.split())


def test_what_env_changes_is_what_the_command_sees() -> None:
    outer = {"A": "1", "B": "2"}
    assert unwrap(["env", "-u", "A", "C=3=4", "python"], outer).environ == {"B": "2", "C": "3=4"}
    assert unwrap(["env", "-i", "C=3", "python"], outer).environ == {"C": "3"}
    assert unwrap(["env", "-S", "C='3 4' python -u", "x.py"], outer).argv == ("python", "-u", "x.py")
    assert unwrap(["env", "-S", "C='3 4' python -u", "x.py"], outer).environ["C"] == "3 4"


def test_only_wrappers_that_place_a_process_are_kept() -> None:
    command = unwrap(["nohup", "taskset", "-c", "0", "time", "-o", "log", "timeout", "5", "python"], {})
    assert command.placement == ("taskset", "-c", "0")


@pytest.mark.parametrize(
    ("words", "inner"),
    [
        ("uv run python x.py", "python x.py"),
        ("uv run --no-sync --with torch==2.13 -p 3.11 -- vllm serve m", "vllm serve m"),
        ("poetry run vllm serve m", "vllm serve m"),
        ("uv run x.py", None),
        ("uv run --env-file e python x.py", None),
        ("uv run -m x", None),
        ("uv pip install x", None),
        ("conda run -n e python x.py", None),
    ],
)
def test_who_chooses_the_python_is_looked_through_where_it_only_does_that(words: str, inner: str | None) -> None:
    found = unwrap(words.split(), {})
    assert (found.chosen, found.argv) == (inner is not None, tuple((inner or words).split()))
    assert unwrap(words.split(), {"UV_ENV_FILE": "e"}).chosen is False


def test_who_chooses_the_python_is_asked_for_it(tmp_path: Path) -> None:
    """It was the first one on the path, whatever torch that has."""
    chosen = script(tmp_path / "venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script(tmp_path / "bin" / "uv", f'#!/bin/sh\nshift\nPATH={chosen.parent}:$PATH exec "$@"\n')
    script(tmp_path / "bin" / "python", "#!/bin/sh\nexit 1\n")
    environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    command = unwrap(["taskset", "-c", str(min(os.sched_getaffinity(0))), "uv", "run", "vllm", "serve"], environ)
    python = interpreter.launcher(command, tmp_path)
    assert python == ("python",)
    found = interpreter.ask(python, (), command, tmp_path)
    assert found is not None
    assert (found.version, len(found.cpus)) == (sys.version.split()[0], 1)


def test_a_shebang_names_the_python(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "venv")
    run = script(tmp_path / "run", f"#!{python} -E\nprint()\n")
    assert launcher(tmp_path, str(run)) == (str(python), "-E")
    assert launcher(tmp_path, "run", path=str(tmp_path)) == (str(python), "-E")


@pytest.mark.parametrize("line", ["#!/usr/bin/env python3", "#!/usr/bin/env -S python3", "#! /usr/bin/env   python3 "])
def test_a_shebang_with_env_searches_the_path(tmp_path: Path, line: str) -> None:
    python = fake_python(tmp_path / "bin", "python3")
    run = script(tmp_path / "run", f"{line}\nprint()\n")
    assert launcher(tmp_path, str(run), path=str(python.parent)) == (str(python),)


def test_env_with_s_in_a_shebang_may_pass_options(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin", "python3")
    run = script(tmp_path / "run", "#!/usr/bin/env -S A=1 python3 -I\n")
    assert launcher(tmp_path, str(run), path=str(python.parent)) == (str(python), "-I")


@pytest.mark.parametrize("folder", ["plain", "with space"])
def test_a_trampoline_names_the_python(tmp_path: Path, folder: str) -> None:
    python = fake_python(tmp_path / folder)
    quoted = f'"{python}"' if " " in folder else str(python)
    run = script(tmp_path / "run", f"#!/bin/sh\n'''exec' {quoted} \"$0\" \"$@\"\n' '''\nimport sys\n")
    assert launcher(tmp_path, str(run)) == (str(python),)


def test_a_relocatable_trampoline_names_its_sibling(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin")
    text = "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\n"
    assert launcher(tmp_path, str(script(tmp_path / "bin" / "run", text))) == (str(python),)


def test_a_shell_script_gets_the_first_python_of_its_path(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bin")
    run = script(tmp_path / "run.sh", "#!/bin/sh\nexec python x.py\n")
    assert launcher(tmp_path, str(run), path=str(python.parent)) == (str(python),)
    assert launcher(tmp_path, "/bin/sh", str(run), path=str(python.parent)) == (str(python),)
    assert launcher(tmp_path, str(run), path=str(tmp_path)) is None


def test_a_missing_command_is_no_such_command(tmp_path: Path) -> None:
    for name in ("nosuch", "./nosuch", ""):
        with pytest.raises(NoSuchCommandError):
            executables.resolve(name, {"PATH": str(tmp_path)}, tmp_path)


def test_a_file_without_permission_cannot_be_executed(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    for name in ("data", "./data"):
        with pytest.raises(CannotExecuteError, match="data"):
            executables.resolve(name, {"PATH": str(tmp_path)}, tmp_path)


def test_a_directory_and_a_word_of_the_shell_are_called_so(tmp_path: Path) -> None:
    with pytest.raises(CannotExecuteError, match="is a directory"):
        executables.resolve(str(tmp_path), {}, tmp_path)
    with pytest.raises(NoSuchCommandError, match="word of the shell"):
        executables.resolve("exec", {"PATH": str(tmp_path)}, tmp_path)


def test_a_later_executable_wins_over_an_earlier_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    good = script(tmp_path / "bin" / "run", "#!/bin/sh\n")
    assert executables.resolve("run", {"PATH": f"{tmp_path}:{good.parent}"}, tmp_path) == good


def test_an_interpreter_says_what_it_is(tmp_path: Path) -> None:
    found = ask(tmp_path, sys.executable)
    assert found is not None
    assert found.version == sys.version.split()[0]
    assert found.implementation == sys.implementation.name
    assert found.machine == os.uname().machine
    assert found.cpus == os.sched_getaffinity(0)
    assert Path(found.include).name.startswith("python3")
    assert "" not in found.path


def test_the_include_directory_is_the_one_of_sysconfig(tmp_path: Path) -> None:
    import sysconfig

    found = ask(tmp_path, sys.executable)
    assert found is not None
    assert found.include == sysconfig.get_path("include")


def test_a_virtual_environment_is_seen_through_its_start_up_code(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    fake_python(venv / "bin")
    site = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(PYTHON).parent}\n")
    found = ask(tmp_path, str(venv / "bin" / "python"))
    assert found is not None
    assert str(site) in found.path


def test_the_answer_survives_a_noisy_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    found = ask(tmp_path, sys.executable, PYTHONPATH=str(tmp_path))
    assert found is not None
    assert str(tmp_path) in found.path


def test_files_in_the_directory_of_the_command_are_not_imported(tmp_path: Path) -> None:
    for name in ("types", "os", "torch", "json", "sysconfig"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)\n")
    assert ask(tmp_path, sys.executable) is not None


def test_the_cpus_of_taskset_are_those_of_the_command(tmp_path: Path) -> None:
    if executables.find("taskset", os.environ, tmp_path) is None:
        pytest.skip("no taskset")
    one = min(os.sched_getaffinity(0))
    command = unwrap(["taskset", "-c", str(one), sys.executable], os.environ)
    found = interpreter.ask((sys.executable,), (), command, tmp_path)
    assert found is not None
    assert found.cpus == {one}


@pytest.mark.parametrize("text", ["exit 3", "echo nothing", "printf 'a\\0b'"])
def test_a_shim_without_a_usable_answer_is_unknown(tmp_path: Path, text: str) -> None:
    assert ask(tmp_path, str(script(tmp_path / "python", f"#!/bin/sh\n{text}\n")), PATH="/bin:/usr/bin") is None


def test_a_question_ends_at_its_limit_with_all_its_processes(tmp_path: Path) -> None:
    run = script(tmp_path / "slow", "#!/bin/sh\nsleep 60\n")
    before = time.monotonic()
    assert executables.ask([str(run)], {"PATH": "/bin:/usr/bin"}, tmp_path, 0.2) is None
    assert time.monotonic() - before < 10


def install(site: Path, project: str, version: str, record: list[str] | None) -> None:
    info = site / f"{project}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n\nVersion: 0\n")
    if record is not None:
        (info / "RECORD").write_text("".join(f"{row}\n" for row in record))


def torch_files(site: Path, text: str) -> None:
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(text)


VERSION = (
    "from typing import Optional\n\n__version__ = '2.13.0+cu128'\ndebug = False\n"
    "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
)
RECORD = ["torch/__init__.py,sha256=aa,1", "torch/_C.so,sha256=bb,2"]


def test_torch_is_read_as_text(tmp_path: Path) -> None:
    torch_files(tmp_path, VERSION)
    install(tmp_path, "torch", "2.13.0+cu128", RECORD)
    found = packages.torch([str(tmp_path)], tmp_path)
    assert (found.version, found.cuda, found.hip, found.site) == ("2.13.0+cu128", "12.8", "none", str(tmp_path))
    assert found.code is not None


def test_a_device_that_torch_is_built_or_extended_for(tmp_path: Path) -> None:
    torch_files(tmp_path / "a", VERSION + "xpu: Optional[str] = '20250301'\n")
    torch_files(tmp_path / "b", VERSION + "xpu: Optional[str] = None\n")
    (tmp_path / "c" / "torch_npu").mkdir(parents=True)
    paths = ("a",), ("b",), ("b", "c")
    assert [packages.torch(path, tmp_path).other for path in paths] == ["xpu", None, "npu"]


def test_without_torch_everything_about_it_is_unknown(tmp_path: Path) -> None:
    assert packages.torch([str(tmp_path), "/nonexistent"], tmp_path) == packages.Torch()


def test_a_version_file_that_is_not_understood_is_unknown(tmp_path: Path) -> None:
    torch_files(tmp_path, "from ._version import *\n")
    found = packages.torch([str(tmp_path)], tmp_path)
    assert (found.version, found.cuda, found.hip) == (None, None, None)


def test_the_first_torch_of_the_path_wins(tmp_path: Path) -> None:
    for name, version in (("a", "2.13.0"), ("b", "2.12.1")):
        torch_files(tmp_path / name, f"__version__ = '{version}'\n")
    assert packages.torch([str(tmp_path / "b"), str(tmp_path / "a")], tmp_path).version == "2.12.1"


def code_of(folder: Path, record: list[str] | None) -> str | None:
    torch_files(folder, VERSION)
    install(folder, "torch", "2.13.0", record)
    return packages.torch([str(folder)], folder).code


def test_installer_notes_byte_code_and_order_are_not_in_the_digest_of_code(tmp_path: Path) -> None:
    noise = [
        "../../../bin/torchrun,sha256=cc,1",
        "torch-2.13.0.dist-info/INSTALLER,sha256=dd,4",
        "torch-2.13.0.dist-info/RECORD,,",
        "torch/__pycache__/__init__.cpython-311.pyc,,",
        "torch/x.pyc,sha256=ee,4",
    ]
    plain = code_of(tmp_path / "a", RECORD)
    assert plain is not None
    assert code_of(tmp_path / "b", [*noise, *reversed(RECORD)]) == plain


def test_another_file_is_another_digest_of_code(tmp_path: Path) -> None:
    assert code_of(tmp_path / "a", RECORD) != code_of(tmp_path / "b", [RECORD[0], "torch/_C.so,sha256=zz,2"])


def test_a_quoted_name_is_read_as_csv(tmp_path: Path) -> None:
    quoted = ['"torch/a,b.py",sha256=aa,1']
    assert code_of(tmp_path / "a", quoted) not in {None, code_of(tmp_path / "b", ['"torch/a,c.py",sha256=aa,1'])}


@pytest.mark.parametrize("record", [None, [], ["__editable__.torch-2.13.0.pth,sha256=aa,1"], ["torch/a.py,,"]])
def test_code_that_nobody_recorded_is_unknown(tmp_path: Path, record: list[str] | None) -> None:
    assert code_of(tmp_path, record) is None


def test_an_editable_torch_is_not_vouched_for_by_a_note_elsewhere(tmp_path: Path) -> None:
    install(tmp_path / "site", "torch", "2.13.0", RECORD)
    torch_files(tmp_path / "source", VERSION)
    found = packages.torch([str(tmp_path / "site"), str(tmp_path / "source")], tmp_path)
    assert (found.version, found.code) == ("2.13.0+cu128", None)


@pytest.mark.parametrize("project", ["triton", "pytorch_triton", "pytorch_triton_rocm"])
def test_every_build_of_triton_counts(tmp_path: Path, project: str) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    install(tmp_path, project, "3.5.0", ["triton/__init__.py,sha256=aa,1"])
    found = packages.triton([str(tmp_path)], tmp_path)
    assert found.version == "3.5.0"
    assert found.code is not None


def test_no_triton_is_known_to_be_none(tmp_path: Path) -> None:
    assert packages.triton([str(tmp_path)], tmp_path) == packages.Triton("none", "none")
