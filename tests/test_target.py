"""Targets: keys of another machine, derived where it is not, and seeds for it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachemgr.errors import UsageError
from cachemgr.factors import describe, target_here
from cachemgr.factors.target import Target, encode, load
from cachemgr.key import derive
from cachemgr.store import layout
from cachemgr.store.captures import captures, enter, no_marks
from cachemgr.store.local import LocalStore
from tests.engines import Engines
from tests.machines import Fleet, Machine

MADE = {"host_name": "prod-1", "made": "2026-11-30T00:00:00Z"}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines.install(tmp_path_factory.mktemp("engines"))


def made_on(machine: Machine, argv: tuple[str, ...], **more: str) -> Target:
    environ = {**machine.environ, **more}
    return target_here(argv, [argv], environ, cwd=machine.root, **MADE)


@pytest.mark.parametrize("flags", [(), ("--max-model-len=64", "-tp", "2"), ("--load-format", "safetensors", "-O1")])
@pytest.mark.parametrize(
    "there",
    [
        {},
        {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "OMP_NUM_THREADS": "3"},
        {"VLLM_UNHEARD_OF": "some text", "TRITON_ODD": "/x/y", "HF_TOKEN": "hf_abcdefghijklmnop", "VLLM_API_KEY": "k"},
        {"HF_HUB_OFFLINE": "1", "CACHEMGR_STORE": "/elsewhere"},
    ],
)
def test_a_key_is_the_same_there_and_here(engines: Engines, there: dict[str, str], flags: tuple[str, ...]) -> None:
    """Also through JSON, and with variables of this machine that would count."""
    machine = engines.machine("production", **there)
    command = engines.serve(*flags)
    profile = describe(command, machine.environ, cwd=machine.root, ignored_args=())
    written = encode(made_on(machine, command))
    assert b"hf_abcdefghij" not in written
    assert b"some text" not in written
    target = msgspec.json.decode(written, type=Target)
    here = describe(("vllm", *command[1:]), {}, cwd=Path("/"), ignored_args=(), target=target)
    assert here.factors == profile.factors
    assert (here.host, here.needs) == (profile.host, profile.needs)


def test_a_program_is_the_same_there_and_here(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    machine = fleet.machine("production", TORCHINDUCTOR_MAX_AUTOTUNE="1", TORCH_ODD="text")
    command = fleet.command("one")
    profile = describe(command, machine.environ, cwd=machine.root, ignored_args=())
    target = made_on(machine, command)
    here = describe(command, {}, cwd=Path("/"), ignored_args=(), target=target)
    assert derive(here.factors) == derive(profile.factors)


def test_variables_of_an_entry_come_before_those_of_the_machine(engines: Engines) -> None:
    machine = engines.machine("production", VLLM_UNHEARD_OF="text", TORCHINDUCTOR_MAX_AUTOTUNE="0")
    command, own = engines.serve(), {"VLLM_UNHEARD_OF": "other", "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    there = describe(command, {**machine.environ, **own}, cwd=machine.root, ignored_args=())
    here = describe(command, own, cwd=Path("/"), ignored_args=(), target=made_on(machine, command))
    assert here.factors == there.factors


def test_nothing_of_the_builder_is_in_a_key(engines: Engines, tmp_path: Path) -> None:
    """It has no vLLM, another torch, CI=true, and variables that count."""
    production = engines.machine("production")
    spec = "[[entries]]\nname = 'llama'\ncommand = ['vllm', 'serve', '" + engines.model + "']\n"
    production.make_places()
    (production.root / "spec.toml").write_text(spec)
    path = f"{engines.directory / 'bin'}:{os.environ['PATH']}"
    written = production.cachemgr("target", "--spec", "spec.toml", PATH=path).stdout
    report = production.run("vllm", "serve", engines.model, PATH=path)
    builder = Machine(tmp_path / "builder", engines.directory / "store", {"CI": "true", "TORCH_FOO": "1"})
    builder.make_places()
    for name, text in (("spec.toml", spec), ("here.json", written)):
        (builder.root / name).write_text(text)
    told = builder.json("lookup", "--target", "here.json", "--", "vllm", "serve", engines.model)
    assert (told["result"], told["key"]) == ("exact", report["key"])
    words = ("prewarm", "--target", "here.json", "--spec", "spec.toml", "--bake", "seed")
    assert json.loads(builder.cachemgr(words[0], "--json", *words[1:]).stdout)["baked"]["artifacts"] == [report["key"]]
    pod = engines.machine("pod", CACHEMGR_STORE=str(tmp_path / "empty"), CACHEMGR_TRUST="seed=off", PATH=path)
    restored = pod.run("vllm", "serve", engines.model, CACHEMGR_SEED=str(builder.root / "seed"))
    assert (restored["where"], restored["verdict"]) == ("seed", "used")


def gpu(target: Target, name: str, capability: str) -> Target:
    """As if it were written on a machine with this GPU."""
    device = msgspec.structs.replace(
        target.platform.device, kind="cuda", names=name, capabilities=capability, driver_cuda="13.0"
    )
    torch = msgspec.structs.replace(target.platform.torch, cuda="13.0")
    platform = msgspec.structs.replace(target.platform, device=device, torch=torch)
    return msgspec.structs.replace(target, platform=platform)


def test_a_seed_for_gpus_that_are_not_here(engines: Engines, tmp_path: Path) -> None:
    """Of two targets the mirror has one; what is missing is named, and the other is baked all the same."""
    builder = engines.machine("builder", CACHEMGR_STORE=str(tmp_path / "store"))
    base = made_on(builder, engines.serve())
    builder.make_places()
    targets = {"h200": gpu(base, "NVIDIA H200", "9.0"), "l4": gpu(base, "NVIDIA L4", "8.9")}
    for name, each in targets.items():
        (builder.root / f"{name}.json").write_bytes(encode(each))
    profile = describe(engines.serve(), {}, cwd=Path("/"), ignored_args=(), target=targets["h200"])
    assert {"device.name": "NVIDIA H200", "device.capability": "9.0"}.items() <= {
        factor.name: factor.value for factor in profile.factors
    }.items()
    key = derive(profile.factors)
    made = builder.run(*engines.serve())
    store = LocalStore(tmp_path / "store")
    (capture,) = captures(store, made["key"], [])
    there = msgspec.structs.replace(capture.manifest, key=key, factors=profile.factors, needs=profile.needs)
    enter(store, there, no_marks)
    (builder.root / "spec.yaml").write_text(
        f"entries:\n- {{name: both, command: [vllm, serve, {engines.model}]}}\n"
        f"- {{name: big, command: [vllm, serve, {engines.model}], gpu: H200}}\n"
        f"- {{name: other, command: [vllm, serve, {engines.model}], gpu: B200}}\n"
    )
    words = ("--target", "h200.json", "--target", "l4.json", "--spec", "spec.yaml", "--bake", "seed")
    told = json.loads(builder.cachemgr("prewarm", "--json", *words, code=3).stdout)
    missing = {(each["name"], each["target"]): each["missing"] for each in told["gathered"]}
    assert missing[("both", "NVIDIA H200")] == ""
    assert missing[("big", "NVIDIA H200")] == ""
    assert "differs in device.capability 8.9≠9.0" in missing[("both", "NVIDIA L4")]
    assert missing[("other", "")] == "it needs B200, and the targets are NVIDIA H200, NVIDIA L4"
    assert told["baked"]["artifacts"] == [key]
    again = builder.cachemgr("prewarm", *words[:-1], "again", code=3)
    assert f"baked into {builder.root / 'again'}: 1 artifact," in again.stderr
    rotten = tmp_path / "store" / layout.layer_name(capture.manifest.layers[0].digest)
    rotten.chmod(0o600)
    rotten.write_bytes(b"rot")
    told = json.loads(builder.cachemgr("prewarm", "--json", *words[:-1], "other", code=1).stdout)
    (both, *_others) = told["gathered"]
    assert both["missing"].startswith("layer sha256:")
    assert told["baked"]["artifacts"] == []


def test_an_architecture_comes_from_its_machine_and_never_from_a_builder_that_has_none(
    engines: Engines, tmp_path: Path
) -> None:
    """No GPU, no driver, and variables of another architecture: what NVIDIA/warp#1085 wanted of kernels."""
    target = gpu(made_on(engines.machine("production"), engines.serve()), "NVIDIA H100 80GB HBM3", "9.0")
    expected = derive(describe(engines.serve(), {}, cwd=Path("/"), ignored_args=(), target=target).factors)
    others = {"CUDA_VERSION": "12.9", "TORCH_CUDA_ARCH_LIST": "8.0", "CUDA_VISIBLE_DEVICES": "", "NVARCH": "sbsa"}
    builder = Machine(tmp_path / "builder", tmp_path / "store", others)
    builder.make_places()
    (builder.root / "h100.json").write_bytes(encode(target))
    told = builder.json("lookup", "--target", "h100.json", "--", "vllm", *engines.serve()[1:], code=1)
    assert told["key"] == expected
    words = ("--target", "h100.json", "--bake", "seed", "--", "vllm", *engines.serve()[1:])
    (missing,) = json.loads(builder.cachemgr("prewarm", "--json", *words, code=1).stdout)["gathered"]
    assert (missing["key"], missing["target"]) == (expected, "NVIDIA H100 80GB HBM3")
    assert "nothing was baked" in builder.cachemgr("prewarm", *words, code=1).stderr
    assert "no such option '--arch'" in builder.cachemgr("prewarm", "--arch=90", *words, code=2).stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 9}, "has schema 9"),
        ({"extra": 1}, "is no target"),
        ({"engine": 3}, "is no target"),
    ],
)
def test_what_is_no_target_is_said(engines: Engines, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    content = json.loads(encode(made_on(engines.machine("production"), engines.serve())))
    path = tmp_path / "target.json"
    path.write_text(json.dumps({**content, **change}))
    machine = Fleet(tmp_path).machine("laptop")
    assert said in machine.cachemgr("lookup", "--target", str(path), "--", "vllm", "serve", "m", code=2).stderr


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{" * 5000, "is no target"),
        (b'{"schema": 1, "host": ' + b"[" * 100_000, "is no target"),
        (b" " * (5 << 20), "is larger than 4.2 MB"),
        ("{}".encode("utf-16"), "is no target"),
        (b"\xef\xbb\xbf{}", "missing required field"),
        (None, "Is a directory"),
    ],
)
def test_a_file_of_any_kind_is_no_target(tmp_path: Path, data: bytes | None, said: str) -> None:
    if data is not None:
        (tmp_path / "target.json").write_bytes(data)
    with pytest.raises(UsageError, match=said):
        load(tmp_path if data is None else tmp_path / "target.json")


def test_a_machine_that_cannot_be_read_is_no_target(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "bare", tmp_path / "store")
    done = machine.cachemgr("target", "--", sys.executable, "-S", "-c", "", code=2)
    assert "torch" in done.stderr
    assert "cannot be read here" in done.stderr


def test_a_target_with_unknown_guards_fits_nothing(engines: Engines, tmp_path: Path) -> None:
    target = made_on(engines.machine("production"), engines.serve())
    platform = msgspec.structs.replace(target.platform, python=None)
    path = tmp_path / "target.json"
    path.write_bytes(encode(msgspec.structs.replace(target, platform=platform)))
    with pytest.raises(UsageError, match=r"python.* could not be read"):
        load(path)
