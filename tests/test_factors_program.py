"""What a command runs: bytes count, paths do not, arguments count as they are written."""

import json
from pathlib import Path

import pytest

from cachemgr.factors import program
from cachemgr.factors.wrappers import unwrap


def factors(cwd: Path, *argv: str, path: tuple[str, ...] = (), ignored: tuple[str, ...] = ()) -> dict[str, str | None]:
    found = program.factors(program.parse(unwrap(argv, {"PATH": str(cwd)}), cwd), path, cwd, ignored)
    assert all(factor.role == "match" for factor in found)
    return {factor.name: factor.value for factor in found}


def arguments(cwd: Path, *argv: str, ignored: tuple[str, ...] = ()) -> list[str]:
    value = factors(cwd, "python", "x.py", *argv, ignored=ignored)["program.args"]
    assert value is not None
    return list(json.loads(value))


def write(path: Path, text: str = "print(1)\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def executable(path: Path, text: str) -> Path:
    write(path, text).chmod(0o755)
    return path


def test_the_same_bytes_elsewhere_are_the_same_program(tmp_path: Path) -> None:
    here, there = write(tmp_path / "x.py"), write(tmp_path / "deep" / "y.py")
    assert factors(tmp_path, "python", "x.py", "a") == factors(tmp_path, "python3.12", str(there), "a")
    assert factors(tmp_path, "python", "x.py") == factors(here.parent / "deep", "python", "../x.py")


def test_other_bytes_are_another_program(tmp_path: Path) -> None:
    write(tmp_path / "x.py"), write(tmp_path / "y.py", "print(2)\n")
    assert factors(tmp_path, "python", "x.py")["program"] != factors(tmp_path, "python", "y.py")["program"]


def test_unreadable_programs_are_told_apart_by_name(tmp_path: Path) -> None:
    assert factors(tmp_path, "python", "x.py")["program"] != factors(tmp_path, "python", "y.py")["program"]


def test_a_directory_runs_its_main(tmp_path: Path) -> None:
    write(tmp_path / "app" / "__main__.py"), write(tmp_path / "x.py")
    assert factors(tmp_path, "python", "app") == factors(tmp_path, "python", "x.py")


def test_a_module_is_its_name_and_its_file(tmp_path: Path) -> None:
    first = write(tmp_path / "site" / "pkg" / "mod.py")
    path = (str(tmp_path / "site"),)
    before = factors(tmp_path, "python", "-m", "pkg.mod", "a", path=path)
    assert before["program"] is not None
    assert before["program"].startswith("pkg.mod sha256:")
    assert before["program.args"] == '["a"]'
    write(first, "print(2)\n")
    assert factors(tmp_path, "python", "-m", "pkg.mod", "a", path=path)["program"] != before["program"]
    assert factors(tmp_path, "python", "-m", "pkg.mod")["program"] == "pkg.mod"


def test_a_package_runs_its_main(tmp_path: Path) -> None:
    write(tmp_path / "pkg" / "__main__.py")
    found = factors(tmp_path, "python", "-mpkg")["program"]
    assert found is not None
    assert found.startswith("pkg sha256:")


def test_code_on_the_command_line_counts_by_its_text(tmp_path: Path) -> None:
    assert factors(tmp_path, "python", "-c", "a", "x") == factors(tmp_path, "python", "-uca", "x")
    assert factors(tmp_path, "python", "-c", "a")["program"] != factors(tmp_path, "python", "-c", "b")["program"]


@pytest.mark.parametrize("argv", [["python"], ["python", "-"], ["python", "-u", "-"]])
def test_a_program_from_stdin_has_no_bytes(tmp_path: Path, argv: list[str]) -> None:
    assert factors(tmp_path, *argv)["program"] == "stdin"


def test_a_console_script_counts_without_the_path_of_its_python(tmp_path: Path) -> None:
    body = "import sys\nfrom app import main\nsys.exit(main())\n"
    scripts = [
        executable(tmp_path / "a" / "app", f"#!/opt/a/bin/python\n{body}"),
        executable(tmp_path / "b" / "app", f"#!/bin/sh\n'''exec' /opt/long/python \"$0\" \"$@\"\n' '''\n{body}"),
    ]
    assert factors(tmp_path, str(scripts[0]), "x") == factors(tmp_path, str(scripts[1]), "x")


@pytest.mark.parametrize("prefix", [["bash"], ["sh", "-e"], []])
def test_a_shell_script_is_a_program(tmp_path: Path, prefix: list[str]) -> None:
    run = executable(tmp_path / "run.sh", "#!/bin/sh\npython x.py\n")
    before = factors(tmp_path, *prefix, "./run.sh", "a")
    assert before["program.args"] == '["a"]'
    executable(run, "#!/bin/sh\npython y.py\n")
    assert factors(tmp_path, *prefix, "./run.sh", "a")["program"] != before["program"]


def test_a_binary_is_its_name(tmp_path: Path) -> None:
    executable(tmp_path / "serve", "\x7fELF")
    assert factors(tmp_path, "serve", "a") == {"program": "command serve", "program.args": '["a"]'}


@pytest.mark.parametrize("options", [["-u"], ["-B", "-E"], ["-uBs"], ["-I", "-q"], ["-v"]])
def test_harmless_options_of_the_interpreter_do_not_count(tmp_path: Path, options: list[str]) -> None:
    assert "program.interpreter_args" not in factors(tmp_path, "python", *options, "x.py")


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        (["-O"], ["-O"]),
        (["-uOO"], ["-O", "-O"]),
        (["-X", "dev", "-u"], ["-Xdev"]),
        (["-Xdev"], ["-Xdev"]),
        (["-W", "error", "-O"], ["-O", "-Werror"]),
    ],
)
def test_options_that_change_meaning_count(tmp_path: Path, options: list[str], counted: list[str]) -> None:
    found = factors(tmp_path, "python", *options, "x.py", "a")
    assert json.loads(found["program.interpreter_args"] or "") == counted
    assert found["program.args"] == '["a"]'


def test_the_interpreter_is_asked_with_the_options_that_decide_its_path() -> None:
    assert program.parse(unwrap(["python", "-uI", "-S", "x.py", "-s"], {}), Path("/")).path_options == ("-I", "-S")


@pytest.mark.parametrize("starter", [["torchrun"], ["python", "-m", "torch.distributed.run"], ["/x/bin/torchrun"]])
def test_torchrun_starts_the_program_that_counts(tmp_path: Path, starter: list[str]) -> None:
    write(tmp_path / "x.py")
    plain = factors(tmp_path, "python", "x.py", "a", "--b")
    found = factors(tmp_path, *starter, "--nproc-per-node", "2", "--standalone", "x.py", "a", "--b")
    assert found == {**plain, "program.launcher_args": '["--nproc-per-node=2"]'}


def test_where_ranks_meet_does_not_count(tmp_path: Path) -> None:
    here = ["--nproc_per_node=2", "--master_addr", "10.0.0.1", "--node-rank=0", "--rdzv_id=7", "--log-dir", "/x"]
    there = ["--nproc-per-node=2", "--master-addr=10.0.0.9", "--node_rank", "1"]
    assert factors(tmp_path, "torchrun", *here, "x.py") == factors(tmp_path, "torchrun", *there, "x.py")


def test_torchrun_may_start_a_module(tmp_path: Path) -> None:
    assert factors(tmp_path, "torchrun", "-m", "pkg.mod", "a") == factors(tmp_path, "python", "-m", "pkg.mod", "a")


def test_accelerate_starts_the_first_script(tmp_path: Path) -> None:
    write(tmp_path / "x.py")
    found = factors(tmp_path, "accelerate", "launch", "--multi_gpu", "--num_processes", "2", "x.py", "a")
    assert found["program"] == factors(tmp_path, "python", "x.py")["program"]
    assert found["program.launcher_args"] == '["--multi_gpu","--num_processes","2"]'
    node = ("--machine_rank", "1", "--main_process_ip=10.0.0.1", "--main-process-port", "29500")
    assert factors(tmp_path, "accelerate", "launch", *node, "--multi_gpu", "--num_processes", "2", "x.py", "a") == found


@pytest.mark.parametrize(
    "argv",
    [
        ["a", "--port", "8000", "b"],
        ["a", "--port=8000", "b"],
        ["--port", "1", "a", "b", "--port=2"],
        ["a", "b", "--port"],
    ],
)
def test_an_ignored_argument_is_dropped_with_its_value(tmp_path: Path, argv: list[str]) -> None:
    assert arguments(tmp_path, *argv, ignored=("--port",)) == ["a", "b"]


def test_an_option_after_an_ignored_flag_is_kept(tmp_path: Path) -> None:
    assert arguments(tmp_path, "--quiet", "--n", "3", "-1", ignored=("--quiet",)) == ["--n", "3", "-1"]


def test_an_ignored_name_is_whole(tmp_path: Path) -> None:
    assert arguments(tmp_path, "--port-range", "1", "port", ignored=("--port",)) == ["--port-range", "1", "port"]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "hunter2", "b"], ["--api-key", "***", "b"]),
        (["--api-key=hunter2", "b"], ["--api-key=***", "b"]),
        (["--hf_token", "-hunter2", "b"], ["--hf_token", "***", "b"]),
        (["--db-password", "hunter2", "b"], ["--db-password", "***", "b"]),
    ],
)
def test_a_secret_is_hidden_and_does_not_count(tmp_path: Path, argv: list[str], shown: list[str]) -> None:
    assert program.shown(argv) == tuple(shown)
    assert arguments(tmp_path, *argv) == ["b"]


def test_secret_variables_and_logins_are_hidden(tmp_path: Path) -> None:
    argv = ["env", "HF_TOKEN=hunter2", "A=1", "python", "x.py", "--url", "https://me:hunter2@host/x"]
    assert program.shown(argv) == ("env", "HF_TOKEN=***", "A=1", "python", "x.py", "--url", "https://***@host/x")
    assert arguments(tmp_path, "https://me:hunter2@host/x") == ["https://***@host/x"]


def test_an_option_that_only_resembles_a_secret_counts(tmp_path: Path) -> None:
    assert arguments(tmp_path, "--max-new-tokens", "64") == ["--max-new-tokens", "64"]


def test_undecodable_arguments_become_text(tmp_path: Path) -> None:
    found = factors(tmp_path, "python", "x\udcff.py", "a\udcff")
    assert all(value is not None and value.encode() for value in found.values())
    assert [word.encode() for word in program.shown(["a\udcff"])] == [b"a\\udcff"]


@pytest.mark.parametrize(
    ("argv", "label"),
    [
        (["python", "/x/y.py"], "y.py"),
        (["python", "-m", "pkg.mod"], "pkg.mod"),
        (["python", "-c", "code"], "-c"),
        (["python"], "-"),
        (["torchrun", "train.py"], "train.py"),
    ],
)
def test_people_see_the_name_of_the_program(argv: list[str], label: str) -> None:
    assert program.parse(unwrap(argv, {}), Path("/")).label == label
