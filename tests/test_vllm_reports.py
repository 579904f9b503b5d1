"""What people reported of compile caches, as launches of a stand-in vLLM: survived, explained or prevented.

Each test is named after what hurt; its comment says which kind of report it stands for. Torn files have their table in
`test_shapes.py`, faults of disks and stores theirs in `test_faults.py`.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachemgr.before import of_part
from cachemgr.domains import TABLE, Target
from cachemgr.domains.vllm import TORCH_COMPILE
from cachemgr.engine_messages import known_reason
from cachemgr.factors import describe, host
from cachemgr.factors.profile import Profile
from cachemgr.factors.vllm import flags as flag_words
from cachemgr.factors.vllm import variables
from cachemgr.factors.vllm.facts import facts_for, known_versions
from cachemgr.key import Relations, broken, compare, misplaced, sight
from cachemgr.order import Part
from cachemgr.origins import Shared
from cachemgr.publish import Published, publish
from cachemgr.statcache import StatCache
from cachemgr.store.local import LocalStore
from cachemgr.warm import restore
from tests import trees
from tests.engines import Engines
from tests.machines import Machine

pytestmark = pytest.mark.slow

every_version = pytest.mark.parametrize("version", known_versions())


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines.install(tmp_path / "image")


def told(report: dict[str, Any]) -> tuple[str, str]:
    return report["result"], report["verdict"]


def differs(report: dict[str, Any]) -> list[str]:
    return [difference["factor"] for difference in report["differs"]]


def root_of(machine: Machine) -> Path:
    return machine.home / ".cache" / "vllm"


def model_of(machine: Machine) -> Path:
    (found,) = root_of(machine).glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model")
    return found


# A miss although nothing that matters changed: every difference is named, with both values.


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"CI": "true"}, {}, "env.CI"),  # built in a CI job, served without
        ({"CXX": "g++"}, {}, "env.CXX"),
        ({"VLLM_PLUGINS": "a"}, {}, "env.VLLM_PLUGINS"),
        ({"VLLM_LOGGING_LEVEL": "DEBUG"}, {}, "env.VLLM_LOGGING_LEVEL"),
        ({"VLLM_LOOPBACK_IP": "10.0.0.1"}, {"VLLM_LOOPBACK_IP": "10.0.0.2"}, "env.VLLM_LOOPBACK_IP"),  # an address
        ({"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "a"}, {}, "env.MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),  # a host's name
    ],
)
def test_a_variable_that_is_set_on_one_side_only_is_named(
    engines: Engines, one: dict[str, str], other: dict[str, str], named: str
) -> None:
    ours, theirs = (described(engines, **each) for each in (one, other))
    found = compare(ours.factors, theirs.factors)
    assert (found.result, [(each.factor, each.role) for each in found.differs]) == ("near", [(named, "match")])


def test_a_cache_that_was_built_in_ci_is_near_and_lookup_names_it_before_the_start(engines: Engines) -> None:
    # A key that is too wide.
    engines.machine("one").run(*engines.serve(), CI="true")
    asked = engines.machine("two").cachemgr("lookup", "--", *engines.serve(), code=None)
    assert asked.returncode == 1
    assert "env.CI" in asked.stdout
    assert told(engines.machine("two").run(*engines.serve())) == ("near", "used")


def test_a_random_id_in_the_configuration_is_named_and_kernels_are_reused(engines: Engines) -> None:
    # Identity in the key: an orchestrator gives every worker an id that the engine hashes.
    engines.machine("one").run(*engines.serve('--additional-config={"worker_id":"7f3a-1"}'))
    other = engines.machine("two").run(*engines.serve('--additional-config={"worker_id":"99ab-2"}'))
    assert (told(other), differs(other)) == (("near", "partly used"), ["flags.additional-config.worker_id"])
    assert other["added"]["triton"] == 0


@pytest.mark.parametrize("variable", ["VLLM_NIXL_SIDE_CHANNEL_HOST", "HOSTNAME", "POD_IP", "HOME", "HF_HOME"])
@every_version
def test_an_address_or_a_home_that_the_engine_ignores_is_no_difference(variable: str, version: str) -> None:
    # Location in the key, as older engines had it.
    facts = facts_for(version)
    if facts.variables.get(variable):
        pytest.skip("hashed by this version, so it must count")
    assert variables.factors({variable: "/one"}, facts) == variables.factors({variable: "/two"}, facts)


def test_one_model_under_two_mounts_is_near_and_both_places_can_be_told_apart(engines: Engines, tmp_path: Path) -> None:
    # Location in the key: the engine hashes the path. Only `model` differs, so the content is known to be equal.
    engines.machine("one").run(*engines.serve())
    elsewhere = tmp_path / "image" / "another-mount-point-of-the-same-volume" / "model"
    shutil.copytree(engines.model, elsewhere)
    command = engines.serve()
    other = engines.machine("two").run(*command[:2], str(elsewhere))
    assert (told(other), differs(other)) == (("near", "partly used"), ["model"])
    line = next(line for line in other["stderr"].splitlines() if "differs in model" in line)
    wanted, _, stored = line.partition("differs in model ")[2].partition(" (match)")[0].partition("≠")
    assert wanted != stored
    assert "another-mount" in wanted


def test_the_same_path_with_another_model_in_it_is_no_hit(engines: Engines) -> None:
    # A key that is too narrow: a mount whose content was replaced.
    engines.machine("one").run(*engines.serve())
    Path(engines.model, "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 8192}')
    other = engines.machine("two").run(*engines.serve())
    assert (other["result"], differs(other)) == ("near", ["model.config"])


def test_offline_on_one_side_is_near_and_names_the_model(engines: Engines, tmp_path: Path) -> None:
    # The engine replaces a hub id by the path of its snapshot when it may not ask the hub.
    hub = tmp_path / "hf"
    folder = hub / "hub" / "models--org--m"
    snapshot = folder / "snapshots" / ("a" * 40)
    shutil.copytree(engines.model, snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    online = described(engines, model="org/m", HF_HOME=str(hub))
    offline = described(engines, model="org/m", HF_HOME=str(hub), HF_HUB_OFFLINE="1")
    found = compare(offline.factors, online.factors)
    assert [(each.factor, each.wanted, each.stored) for each in found.differs] == [("model", str(snapshot), "org/m")]
    assert found.result == "near"


def test_an_engine_that_looks_elsewhere_is_told_from_one_that_used_its_cache(engines: Engines) -> None:
    # "Installed" is not "used": the engine's own log and directories decide.
    engines.machine("one").run(*engines.serve())
    other = engines.machine("two").run(*engines.serve(), STAND_IN="elsewhere")
    assert told(other) == ("exact", "partly used")
    assert sum(other["added"].values()) == 0, "the directories alone would say that all is well"
    assert [entry["verdict"] for entry in other["observed"]["entries"]] == ["compiled"]
    assert any("/elsewhere/torch_compile_cache/" in reason for reason in other["reasons"])


def test_a_capture_without_a_torch_tree_is_topped_up_and_not_believed(engines: Engines) -> None:
    # An empty bundle that counts as a valid cache.
    engines.machine("one").run(*engines.serve(), STAND_IN="no-compile")
    topped = engines.machine("two").run(*engines.serve())
    assert told(topped) == ("exact", "partly used")
    assert topped["published"] is not None
    assert told(engines.machine("three").run(*engines.serve())) == ("exact", "used")


def test_a_capture_is_never_replaced_by_a_smaller_one(engines: Engines) -> None:
    # A bundle that was saved after a partly warm run is smaller than the one it replaces.
    engines.machine("one").run(*engines.serve())
    engines.machine("two").run(*engines.serve(), STAND_IN="no-compile")
    assert told(engines.machine("three").run(*engines.serve())) == ("exact", "used")


# A wrong or stale hit.


NARROW = [
    ("--speculative-config={speculative}7}}", "--speculative-config={speculative}9}}"),
    ('--limit-mm-per-prompt={{"image":0}}', '--limit-mm-per-prompt={{"image":0,"video":0,"audio":0}}'),
    ("--mm-encoder-tp-mode=weights", "--mm-encoder-tp-mode=data"),
    ("--attention-backend=TRITON_ATTN", "--attention-backend=FLASH_ATTN"),
    ('--hf-overrides={{"rope_theta":1}}', '--hf-overrides={{"rope_theta":2}}'),
    ("--max-num-batched-tokens=2048", "--max-num-batched-tokens=8192"),
    ("--kv-cache-dtype=fp8", "--kv-cache-dtype=auto"),
    ("--quantization=fp8", "--quantization=awq"),
    ("--enable-lora", "--no-enable-lora"),
    ("-tp=1", "-tp=2"),
    ("-dp=1", "-dp=2"),
    ("-pp=1", "-pp=2"),
    ("--a-flag-of-tomorrow=1", "--a-flag-of-tomorrow=2"),
]


@every_version
@pytest.mark.parametrize(("one", "other"), NARROW)
def test_launches_that_compile_differently_are_never_one_artifact(version: str, one: str, other: str) -> None:
    # A key that is too narrow, by the engine's or by ours.
    facts = facts_for(version)
    speculative = '{"method":"ngram","num_speculative_tokens":'
    ours, theirs = (
        flag_words.factors(
            flag_words.parse(["m", words.format(speculative=speculative)], facts, "serve", Path("/")), facts
        )
        for words in (one, other)
    )
    found = compare(ours, theirs)
    assert found.result == "near"
    hashed = {flag.name for flag in facts.flags if flag.hashed}
    for difference in found.differs:
        name = difference.factor.removeprefix("flags.").partition(".")[0]
        assert difference.role == "blind" or name in hashed or name in facts.keys or name == "enable-lora"


@every_version
@pytest.mark.parametrize("name", ["VLLM_PP_LAYER_PARTITION", "VLLM_ATTENTION_BACKEND", "VLLM_USE_TOMORROW"])
def test_a_variable_that_shapes_the_graph_is_never_ignored(version: str, name: str) -> None:
    # 21,20,20 and 22,20,19 layers on three ranks took one graph.
    facts = facts_for(version)
    found = compare(*(variables.factors({name: value}, facts) for value in ("21,20,20", "22,20,19")))
    assert [each.factor for each in found.differs] == [f"env.{name}"]
    assert found.differs[0].role == ("match" if facts.variables.get(name) else "blind")


def test_two_images_of_one_version_with_other_code_share_nothing(tmp_path: Path) -> None:
    # A nightly build or a patched image: equal versions, other code.
    one, other = (Engines.install(tmp_path / name) for name in ("one", "two"))
    record = next(Path(other.variables["PYTHONPATH"]).glob("vllm-*.dist-info/RECORD"))
    record.write_text("vllm/__init__.py,sha256=patched,0\n")
    one.machine("machine").run(*one.serve())
    found = Machine(tmp_path / "m", tmp_path / "one" / "store", other.variables).run(*other.serve())
    assert told(found) == ("none", "cold")
    assert "vllm.code" in differs(found)


def test_an_upgraded_engine_does_not_replay_what_the_old_one_made_in_the_same_home(tmp_path: Path) -> None:
    # A crash loop after an update: the volume keeps the entries of the old version.
    old, new = (Engines.install(tmp_path / version, version) for version in ("0.31.0", "0.32.0"))
    shutil.rmtree(new.model)
    shutil.copytree(old.model, new.model)
    store = tmp_path / "store"
    Machine(tmp_path / "pod", store, old.variables).run(*old.serve())
    pod = Machine(tmp_path / "pod", store, new.variables)
    report = pod.run(str(new.directory / "bin" / "vllm"), "serve", old.model, STAND_IN="die")
    assert told(report) == ("none", "cold"), "it would have died of the old entry"
    assert "vllm" in differs(report)


def test_a_crash_loop_ends_at_the_second_start_also_without_a_store_to_publish_to(engines: Engines) -> None:
    # Each restart replays the same bad artifact, until somebody removes it by hand.
    engines.machine("one").run(*engines.serve())
    machine = engines.machine("two")
    codes = [machine.run(*engines.serve(), code=1, STAND_IN="die")["exit_code"]]
    codes.append(machine.run(*engines.serve(), STAND_IN="die")["exit_code"])
    assert codes == [1, 0]
    aside = [path for path in root_of(machine).rglob("model") if ".cachemgr-aside" in str(path)]
    assert aside, "the evidence is kept"


def test_a_cache_directory_of_the_user_is_told_because_the_engine_takes_anything_in_it(engines: Engines) -> None:
    # `cache_dir` replaces the engine's own hash: whatever lies there is taken.
    for words in ("-cc.cache_dir=/x/y", '--compilation-config={"cache_dir":"/x/y"}'):
        profile = described(engines, words)
        assert any("/x/y" in note and "neither checked nor captured" in note for note in profile.notes)
        found = compare(profile.factors, described(engines).factors)
        assert [(each.factor, each.role) for each in found.differs] == [("flags.compilation-config.cache_dir", "blind")]
    assert described(engines, "-cc.mode=3").notes == ()


# GPUs, drivers, ranks and devices.


def nvml(*names: str, driver: int = 13000, capability: tuple[int, int] = (9, 0)) -> SimpleNamespace:
    """NVML of a host with these GPUs."""

    def unsupported(*_handle: object) -> None:
        raise RuntimeError

    return SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: names[handle],
        nvmlDeviceGetMigMode=unsupported,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=unsupported,
        nvmlDeviceGetCudaComputeCapability=lambda _handle: capability,
        nvmlSystemGetCudaDriverVersion_v2=lambda: driver,
    )


def described(engines: Engines, *words: str, model: str | None = None, **environ: str) -> Profile:
    """The profile of `vllm serve MODEL WORDS` in this image."""
    program, serve, own = engines.serve()
    variables = {"PATH": os.environ["PATH"], "HOME": "/root", **engines.variables, **environ}
    return describe([program, serve, model or own, *words], variables, cwd=Path("/"), ignored_args=())


class Gpus:
    """Profiles of launches on hosts with GPUs, with a torch for CUDA 12.8."""

    def __init__(self, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engines, self._monkeypatch = engines, monkeypatch
        version = Path(engines.variables["PYTHONPATH"]) / "torch" / "version.py"
        version.write_text("__version__ = '2.10.0+cu128'\ncuda = '12.8'\nhip = None\n")
        monkeypatch.setattr(host, "_NVIDIA_NODES", (Path("/dev/null"),))

    def see(self, found: SimpleNamespace) -> None:
        self._monkeypatch.setitem(sys.modules, "pynvml", found)

    def profile(self, found: SimpleNamespace, *words: str, **environ: str) -> Profile:
        self.see(found)
        return described(self._engines, *words, **environ)


@pytest.fixture
def gpus(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(engines, monkeypatch)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (nvml("NVIDIA H100 80GB HBM3"), nvml("NVIDIA H200"), ["device.name"]),
        (nvml("Tesla V100", capability=(7, 0)), nvml("A100", capability=(8, 0)), ["device.capability", "d"]),
        (nvml("NVIDIA RTX 4080"), nvml("NVIDIA RTX 4080", "NVIDIA RTX 3080"), ["device.name"]),  # a mixed box
    ],
)
def test_what_another_gpu_compiled_is_refused_and_named(
    gpus: Gpus, one: SimpleNamespace, other: SimpleNamespace, named: list[str]
) -> None:
    # A binary that does not fit the host: no kernel image, or code for another chip.
    stored, wanted = gpus.profile(one), gpus.profile(other)
    found = compare(wanted.factors, stored.factors)
    assert found.result == "none"
    assert len(found.differs) == len(named)
    assert found.differs[0].factor == named[0]
    assert found.differs[0].wanted != found.differs[0].stored
    assert sight(wanted.factors) != sight(stored.factors), "nor may it be found on a volume that both mount"


@pytest.mark.parametrize(
    ("made_under", "driver", "fits"),
    [
        (12080, 12080, True),
        (13000, 12080, True),
        (13000, 12040, False),  # code of a ptxas that is newer than the driver
        (13000, 11040, False),  # driver 470
        (12040, 12040, True),  # made under that very driver, so it runs there: minor versions are compatible
        (12040, 12020, False),
        (12040, 13000, True),
    ],
)
def test_a_driver_that_is_older_than_what_was_compiled_is_refused(
    gpus: Gpus, made_under: int, driver: int, fits: bool
) -> None:
    # A binary that does not fit the host: invalid kernel image under an old driver.
    made = gpus.profile(nvml("NVIDIA H200", driver=made_under))
    here = gpus.profile(nvml("NVIDIA H200", driver=driver))
    assert compare(here.factors, made.factors).result == "exact"
    assert [fault.relation for fault in broken(made.needs, here.host)] == ([] if fits else ["cuda_runtime"])


H200 = nvml(*["NVIDIA H200"] * 4)


@pytest.mark.parametrize(
    ("words", "waiting"),
    [
        ((), 1),
        (("-tp=2", "-pp=2"), 4),
        (("-tp=16", "--distributed-executor-backend=ray"), 16),
        (("-tp=2", "--distributed-executor-backend=external_launcher"), None),
    ],
)
def test_how_many_gpus_wait_for_a_start(gpus: Gpus, words: tuple[str, ...], waiting: int | None) -> None:
    found = gpus.profile(H200, *words)
    assert found.gpus == waiting
    assert of_part(found, Part("launch", "desk", ("rank_0_0",), ())).gpus == 0, "each is in one record"


def test_a_program_is_known_to_wait_for_the_only_gpu_that_it_sees(gpus: Gpus, engines: Engines) -> None:
    def waiting(*names: str, **environ: str) -> int | None:
        gpus.see(nvml(*names))
        variables = {"PATH": os.environ["PATH"], "HOME": "/root", **engines.variables, **environ}
        return describe([sys.executable, "-c", "import torch"], variables, cwd=Path("/"), ignored_args=()).gpus

    assert waiting("NVIDIA H200") == 1
    assert waiting("NVIDIA H200", "NVIDIA H200") is None, "it may use both"
    assert waiting("NVIDIA H200", "NVIDIA H200", CUDA_VISIBLE_DEVICES="1") == 1
    assert waiting("NVIDIA H200", CUDA_VISIBLE_DEVICES="") == 0


@pytest.mark.parametrize(
    ("one", "other", "shares"),
    [
        ((), ("--device-ids=0",), True),
        ((), ("--device-ids=1",), False),
        (("-tp=2",), ("-tp=2", "--device-ids=1,0"), False),
        (("-tp=2",), (), True),  # another world has names of its own
        (("-tp=2", "-dp=2"), ("-tp=2", "-dp=2", "--data-parallel-rank=1"), False),
        (("-dp=4", "--data-parallel-rank=1"), ("-dp=4", "--data-parallel-rank=2"), True),
    ],
)
def test_code_for_another_device_of_the_host_is_not_left_to_be_found(
    gpus: Gpus, one: tuple[str, ...], other: tuple[str, ...], shares: bool
) -> None:
    # Rank and device identity: equal names, and the ordinal inside of the code.
    here, there = gpus.profile(H200, *one), gpus.profile(H200, *other)
    common = [flag for flag in here.factors if flag.role != "match"]
    assert (sight(common, here.host.ordinals) == sight(common, there.host.ordinals)) is shares
    assert bool(misplaced(here.needs, there.host)) <= (not shares)


def test_a_visible_device_is_number_zero_whichever_it_is(gpus: Gpus) -> None:
    # One engine per GPU, each with its own CUDA_VISIBLE_DEVICES.
    one, other = (gpus.profile(H200, CUDA_VISIBLE_DEVICES=device) for device in ("0", "3"))
    assert (one.factors, one.needs) == (other.factors, other.needs)


@pytest.mark.parametrize("made", [True, False])
def test_an_entry_of_another_device_is_strange(tmp_path: Path, made: bool) -> None:
    trees.torch_compile(tmp_path / "torch_compile_cache")
    place = Target(TORCH_COMPILE, str(tmp_path / "torch_compile_cache"), ours=False)
    ours, theirs = (sight([], {"rank_0_0": ordinal}) for ordinal in (0, 1))
    units = [f"torch_aot_compile/{trees.AOT_NAME}", trees.TEN_HEX]
    Shared(str(tmp_path), [place], ours, "launch-1").vouch({"torch_compile": units})
    found = Shared(str(tmp_path), [place], ours if made else theirs, "launch-2").strange()
    assert sorted(unit for _target, unit in found) == ([] if made else sorted(units))


def capture_of_ranks(
    tmp_path: Path, launch: str, directories: dict[str, bytes], *, ranks: tuple[str, ...] = (), **drafted: Any
) -> Published:
    """Publish an AOT entry with these rank directories."""
    room = tmp_path / launch / "torch_compile"
    trees.write(room, {f"{AOT}/{name}/model": data for name, data in directories.items()})
    return publish(
        LocalStore(tmp_path / "store"),
        trees.draft(launch=launch, **drafted),
        [trees.tree_of(TORCH_COMPILE, room)],
        StatCache({}),
        near=(),
        ranks=ranks,
        now_ns=trees.NOW_NS,
    )


def restored_ranks(tmp_path: Path, ordinals: dict[str, int], room: str) -> dict[str, bytes]:
    """What a launch with these ranks would find below the AOT entry."""
    store = LocalStore(tmp_path / "store")
    found = trees.look_up(store, host=Relations(ordinals=ordinals))
    places = [Target(TORCH_COMPILE, str(tmp_path / room), ours=False)]
    restore(
        store,
        found.captures,
        places,
        trees=found.trees,
        ranks=tuple(ordinals),
        launch=room,
        now_ns=trees.NOW_NS,
        expired=lambda: False,
    )
    return {path.removeprefix(AOT + "/"): data for path, data in trees.read(tmp_path / room).items()}


AOT = f"torch_aot_compile/{trees.AOT_NAME}"
CODE = {name: b"\x80\x05 code for %s." % name.encode() for name in ("device 0", "device 1")}


@pytest.mark.parametrize("suffixes", [("", ""), ("_dev0", "_dev1")])
def test_a_rank_gets_the_code_of_its_own_device(tmp_path: Path, suffixes: tuple[str, str]) -> None:
    # Engines with one rank each on several devices, in the usual layout and in that with the device in its name.
    for ordinal, suffix in enumerate(suffixes):
        needs = Relations(ordinals={"rank_0_0": ordinal})
        code = CODE[f"device {ordinal}"]
        capture_of_ranks(tmp_path, f"launch-{ordinal}", {f"rank_0_0{suffix}": code}, needs=needs)
    for ordinal, suffix in enumerate(suffixes):
        found = restored_ranks(tmp_path, {"rank_0_0": ordinal}, f"room-{ordinal}")
        assert found == {f"rank_0_0{suffix}/model": CODE[f"device {ordinal}"]}
    assert restored_ranks(tmp_path, {"rank_0_0": 2}, "room-2") == {}


@pytest.mark.parametrize(
    "weaker", [Relations(cuda_runtime="12.8", driver_cuda="12.4"), Relations(cpu_features=("avx2",))]
)
def test_a_host_that_may_not_use_a_capture_gets_one_of_its_own(tmp_path: Path, weaker: Relations) -> None:
    # An old driver or CPU in a fleet: the entry has the same name there, and would be taken for captured already.
    stronger = Relations(cuda_runtime="12.8", driver_cuda="13.0")
    if weaker.cpu_features:
        stronger = Relations(cpu_features=("avx2", "avx512f"))
    capture_of_ranks(tmp_path, "launch-0", {"rank_0_0": CODE["device 0"]}, needs=stronger)
    store = LocalStore(tmp_path / "store")
    assert trees.look_up(store, host=weaker).result == "none"
    capture_of_ranks(tmp_path, "launch-1", {"rank_0_0": CODE["device 1"]}, needs=weaker)
    assert [trees.look_up(store, host=each).result for each in (weaker, stronger)] == ["exact", "exact"]


def test_an_unknown_layout_of_ranks_travels_as_a_whole(tmp_path: Path) -> None:
    directories = {"rank_0_0_sp1": b"\x80\x05one.", "rank_0_0_sp2": b"\x80\x05two."}
    needs = Relations(ordinals={"rank_0_0": 0})
    assert capture_of_ranks(tmp_path, "launch-0", directories, ranks=("rank_0_0",), needs=needs).refused == ()
    found = restored_ranks(tmp_path, {"rank_0_0": 0}, "room")
    assert found == {f"{name}/model": data for name, data in directories.items()}


def test_one_rank_of_many_that_failed_leaves_the_entry_unpublished(tmp_path: Path) -> None:
    # One of 64 parallel compiles dies and the rest drop at a barrier.
    ranks = tuple(f"rank_{number}_0" for number in range(64))
    directories = {name: b"\x80\x05x." for name in ranks if name != "rank_17_0"}
    published = capture_of_ranks(tmp_path, "launch-0", directories, ranks=ranks, complete=False)
    assert [refused.reason for refused in published.refused] == ["has nothing of rank_17_0"]
    assert published.capture is None


def test_a_rank_without_its_model_leaves_the_entry_unpublished_however_the_start_went(tmp_path: Path) -> None:
    directories = {"rank_0_0": b"\x80\x05x.", "rank_1_0": b""}
    published = capture_of_ranks(tmp_path, "launch-0", directories, ranks=("rank_0_0", "rank_1_0"))
    assert published.capture is None


@pytest.mark.parametrize("words", [("-tp=2",), ("-dp=2",), ("-pp=2",)])
def test_another_world_is_near_and_reuses_what_no_rank_is_in(engines: Engines, words: tuple[str, ...]) -> None:
    # A cache of one topology asked for by another.
    engines.machine("one").run(*engines.serve())
    other = engines.machine("two").run(*engines.serve(*words))
    assert other["result"] == "near"
    assert other["added"]["triton"] == other["added"]["modelinfos"] == 0


# Copies, left-overs and ownership.


def copied(engines: Engines, *, keep_old: bool) -> Machine:
    """A machine whose caches were copied by hand, times and all, from one that cachemgr served."""
    one, two = engines.machine("one"), engines.machine("two")
    one.run(*engines.serve())
    two.make_places()
    shutil.copytree(root_of(one), root_of(two))
    if not keep_old:
        shutil.rmtree(root_of(one))
    return two


@pytest.mark.parametrize("keep_old", [True, False])
def test_a_root_that_was_copied_by_hand_is_replaced_by_what_was_verified(engines: Engines, keep_old: bool) -> None:
    # Absolute paths of another root: an index up to 0.31 names the place it was made at, and the engine dies or reads
    # there. Notes that say where entries come from are copied along.
    two = copied(engines, keep_old=keep_old)
    report = two.run(*engines.serve())
    assert told(report) == ("exact", "used")
    assert "set aside until the engine has looked" in report["stderr"]
    assert report["restored_files"] > 0
    assert told(two.run(*engines.serve())) == ("exact", "used"), "and its place is known from then on"
    assert "set aside" not in two.run(*engines.serve())["stderr"]


@pytest.mark.parametrize("keep_old", [True, False])
def test_an_index_of_another_root_arrives_with_the_paths_of_this_one(tmp_path: Path, keep_old: bool) -> None:
    # The same in a capture: files that were copied by hand before anybody captured them.
    old, live, new = tmp_path / "old", tmp_path / "live", tmp_path / "new"
    trees.build(old, ["torch_compile", "triton", "inductor"])
    shutil.copytree(old, live)
    if not keep_old:
        shutil.rmtree(old)
    store = LocalStore(tmp_path / "store")
    assert trees.publish_trees(store, trees.live(live)).refused == ()
    trees.restore_found(store, trees.look_up(store), trees.targets(new))
    moved = [trees.assert_moved(domain, live / domain.name, new / domain.name) for domain in TABLE[:1]]
    assert sum(moved) > 0
    names = [data for path, data in trees.read(new).items() if path.endswith((".json", "vllm_compile_cache.py"))]
    assert not any(str(old).encode() in data or str(live).encode() in data for data in names)


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (lambda model: model.write_bytes(b""), "is empty"),
        (lambda model: model.write_bytes(model.read_bytes()[:100]), "is cut off"),
        (lambda model: model.unlink(), None),
    ],
)
def test_a_torn_entry_is_replaced_before_the_engine_dies_of_it(engines: Engines, hurt: Any, said: str | None) -> None:
    # A torn or empty model after a crash or a full disk: an engine that meets it dies, or compiles again at each start.
    machine = engines.machine("one")
    machine.run(*engines.serve())
    hurt(model_of(machine))
    report = machine.run(*engines.serve())
    assert told(report) == ("exact", "used")
    assert said is None or said in report["stderr"] or "set aside" in report["stderr"]
    assert model_of(machine).stat().st_size > 3000


def test_left_overs_and_stale_locks_of_the_dead_neither_stop_a_start_nor_travel(engines: Engines) -> None:
    # Orphan temporaries and locks after a kill.
    one = engines.machine("one")
    one.run(*engines.serve())
    entry = model_of(one).parent.parent
    left = [entry / "rank_0_0" / "model.4242.tmp", entry / "inductor_cache" / "locks" / "cab.lock"]
    left.append(next(root_of(one).glob("cachemgr/*/triton")) / "tmp.pid_4242_ab" / "x.ptx")
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert told(one.run(*engines.serve())) == ("exact", "used")
    two = engines.machine("two")
    assert told(two.run(*engines.serve())) == ("exact", "used")
    assert not [path for path in root_of(two).rglob("*") if path.name.endswith((".tmp", ".ptx", ".lock"))]


def test_files_that_only_their_owner_could_read_arrive_readable_for_the_engine(engines: Engines) -> None:
    # torch writes `model` with mode 0600, whatever the umask.
    one, two = engines.machine("one"), engines.machine("two")
    one.run(*engines.serve())
    model_of(one).chmod(0o600)
    one.run(*engines.serve("--max-model-len=8192"))
    assert told(two.run(*engines.serve())) == ("exact", "used")
    mode = stat.S_IMODE(model_of(two).stat().st_mode)
    assert mode & 0o444 == 0o444
    assert not mode & 0o022


def test_a_bare_engine_before_and_after_is_not_disturbed(engines: Engines) -> None:
    # The same root without the wrapper: what is there works for an engine that knows nothing of us.
    machine = engines.machine("one")
    machine.run(*engines.serve())
    bare = subprocess.run([*engines.serve()], env=machine.environ, capture_output=True, text=True, check=True)
    assert "Directly load AOT" in bare.stdout
    assert told(machine.run(*engines.serve())) == ("exact", "used")


# What engines say.


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory", "library"),
        ("OSError: libsycl.so.8: cannot open shared object file: No such file or directory", "library"),
        ("CUDA error: no kernel image is available for execution on the device", "GPU"),
        ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "GPU"),
        ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", "driver"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/build/torch_compile_cache/1/x'", "root"),
        ("OSError: [Errno 116] Stale file handle", "network"),
        ("OSError: [Errno 122] Disk quota exceeded", "full"),
    ],
)
def test_an_error_text_of_a_report_is_explained(reason: str, word: str) -> None:
    known = known_reason(reason)
    assert known is not None
    assert word in known.explanation
    assert known.fix
