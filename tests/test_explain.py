"""`why`: each class of miss with the sentence that a person gets, and exactly the factors that differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.capture import Entry, Launch, Observation
from cachemgr.engine_notes import Notes, of_capture, of_live, says
from cachemgr.explain import Account, Case, account, compare_notes, compared, engine_says, explained, miss, of_launch
from cachemgr.factors import describe
from cachemgr.factors.profile import Profile
from cachemgr.factors.vllm.facts import facts_for, known_versions
from cachemgr.factors.vllm.levels import turned_on
from cachemgr.key import Difference, Factor, Role, compare, derive, folder
from cachemgr.lint import hazards
from cachemgr.meanings import MEANINGS, meaning
from cachemgr.store import Store
from cachemgr.store.captures import captures
from cachemgr.store.s3 import faults
from tests.engines import Engines
from tests.machines import Fleet
from tests.test_capture import LAUNCH
from tests.trees import FACTORS, TEN_HEX, build, publish_trees

ALL = {factor.name: factor for factor in FACTORS}


class Shop:
    """Describes launches of a stand-in vLLM of one version."""

    def __init__(self, directory: Path, version: str) -> None:
        self.engines = Engines.install(directory, version)
        self.directory = directory

    def profile(
        self, options: Sequence[str] = (), variables: Mapping[str, str] | None = None, model: str = ""
    ) -> Profile:
        environ = {**self.engines.machine("one").environ, **(variables or {})}
        command = [*self.engines.serve(*options)]
        if model:
            command[2] = model
        return describe(command, environ, cwd=self.directory, ignored_args=())

    def explained(self, profile: Profile, other: Profile) -> Account:
        """Why a launch with the first profile is not exact, where an artifact has the second."""
        ours, theirs = profile.factors, other.factors
        found = compare(ours, theirs)
        return account(Case(derive(ours), found.result, derive(theirs), found.differs, ours), nearest=theirs)


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shop]:
    return {version: Shop(tmp_path_factory.mktemp("shop"), version) for version in ("0.26.0", "0.32.0")}


SPECULATION = '--speculative-config={"method": "ngram", "num_speculative_tokens": 5}'
RANDOM_ID = '--additional-config={"worker": "7f9c24e8b0a14d6e"}'

CHANGED: dict[str, tuple[str, Sequence[str], Mapping[str, str], str, str, str, bool]] = {
    # class: version, options, variables, the factor, what it means, what to do, whether it is harmless
    "pod IP": (
        "0.32.0", (), {"VLLM_P2P_SIDE_CHANNEL_HOST": "10.1.2.3"},
        "env.VLLM_P2P_SIDE_CHANNEL_HOST", "an address of this pod", "unset VLLM_P2P_SIDE_CHANNEL_HOST", True,
    ),
    "pod port": (
        "0.32.0", (), {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"},
        "env.VLLM_NIXL_SIDE_CHANNEL_PORT", "an address of this pod", "unset VLLM_NIXL_SIDE_CHANNEL_PORT", True,
    ),
    "HOME or XDG": (
        "0.26.0", (), {"VLLM_CONFIG_ROOT": "/home/other/.config/vllm"},
        "env.VLLM_CONFIG_ROOT", "below HOME, XDG_CONFIG_HOME", "VLLM_CONFIG_ROOT to one path on all machines", True,
    ),
    "Ray bundle": (
        "0.26.0", (), {"VLLM_RAY_BUNDLE_INDICES": "0,1"},
        "env.VLLM_RAY_BUNDLE_INDICES", "Ray's choice of devices", "unset VLLM_RAY_BUNDLE_INDICES", True,
    ),
    "DEBUG logging": (
        "0.32.0", (), {"VLLM_LOGGING_LEVEL": "DEBUG"},
        "env.VLLM_LOGGING_LEVEL", "DEBUG turns on asserts", "unset VLLM_LOGGING_LEVEL", True,
    ),
    "VLLM_PLUGINS": (
        "0.32.0", (), {"VLLM_PLUGINS": "lora_filesystem_resolver"},
        "env.VLLM_PLUGINS", "part of its own hash", "unset VLLM_PLUGINS", False,
    ),
    "CI": ("0.32.0", (), {"CI": "true"}, "env.CI", "torch compiles otherwise", "unset CI", False),
    "CXX": ("0.32.0", (), {"CXX": "/usr/bin/c++"}, "env.CXX", "in Inductor's key", "spell CXX the same", False),
    "speculative tokens": (
        "0.32.0", (SPECULATION,), {},
        "flags.speculative-config.num_speculative_tokens", "a wrong entry", "--speculative-config", False,
    ),
    "capture sizes": (
        "0.32.0", ('--compilation-config={"cudagraph_capture_sizes": [1, 2, 4]}',), {},
        "flags.compilation-config.cudagraph_capture_sizes", "the batch sizes that graphs", "let vLLM choose", False,
    ),
    "random id": (
        "0.32.0", (RANDOM_ID,), {},
        "flags.additional-config.worker", "an id of one worker or run", "keep ids out of --additional-config", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_launch_changed_is_named_and_explained(shops: dict[str, Shop], kind: str) -> None:
    version, options, variables, factor, means, fix, harmless = CHANGED[kind]
    shop = shops[version]
    told = shop.explained(shop.profile(options, variables), shop.profile())
    found = {each.factor: each for each in told.differs}
    assert factor in found, found.keys()
    assert means in found[factor].means
    assert fix in found[factor].fix
    assert bool(found[factor].harmless) is harmless
    first = told.differs[0].role
    assert told.word == ("differs" if first == "match" else first)
    assert told.fix == told.differs[0].fix, "what is named first is what to do first"


def test_a_model_under_another_path_is_the_same_model(shops: dict[str, Shop], tmp_path: Path) -> None:
    shop = shops["0.32.0"]
    moved = tmp_path / "elsewhere"
    moved.symlink_to(shop.engines.model)
    (told,) = shop.explained(shop.profile(model=str(moved)), shop.profile()).differs
    assert (told.factor, told.wanted) == ("model", str(moved))
    assert told.harmless == "the configuration files are the same"
    assert "HF_HUB_OFFLINE" in told.fix
    (moved := tmp_path / "other").mkdir()
    (moved / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    both = shop.explained(shop.profile(model=str(moved)), shop.profile()).differs
    assert [each.harmless for each in both if each.factor == "model"] == [""]


def test_offline_rewriting_of_a_model_is_said(shops: dict[str, Shop], tmp_path: Path) -> None:
    shop = shops["0.32.0"]
    cached = tmp_path / "hub" / "models--acme--llama"
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    online = shop.profile(variables=hub, model="acme/llama")
    offline = shop.profile(variables={**hub, "HF_HUB_OFFLINE": "1"}, model="acme/llama")
    (told,) = shop.explained(offline, online).differs
    assert (told.factor, told.stored) == ("model", "acme/llama")
    assert told.wanted == str(snapshot)
    assert "offline, that of the snapshot" in told.means
    assert told.harmless


GUARDS = {
    "another GPU of the same architecture": ("device.name", "NVIDIA H100 PCIe", "within one architecture", False),
    "Python patch version": ("python", "CPython 3.12.9", "differs between patch releases", False),
    "another venv path": ("prefix", "/opt/venv/lib", "as in another virtual environment", True),
    "another compiler": ("compiler", "g++ 14", "C++ compiler", False),
    "another torch": ("torch", "2.14.0", "another torch", False),
    "another vLLM": ("vllm", "0.33.0", "another vLLM", False),
    "a kernel package": ("package.flashinfer-python", "0.9.9", "has kernels", False),
}


@pytest.mark.parametrize("kind", GUARDS)
def test_a_guard_that_differs_is_named_and_explained(kind: str) -> None:
    name, value, means, harmless = GUARDS[kind]
    theirs: tuple[Factor, ...] = (*FACTORS, Factor("device.capability", "9.0", "guard"))
    if name not in ALL:
        theirs = (*theirs, Factor(name, "before", "guard"))
    ours = tuple(Factor(name, value, "guard") if factor.name == name else factor for factor in theirs)
    found = compare(ours, theirs)
    told = account(Case(derive(ours), found.result, derive(theirs), found.differs, ours), nearest=theirs)
    assert (told.word, told.result) == ("guard", "none")
    assert told.says == "the nearest artifact cannot be used: what must be equal differs"
    (each,) = told.differs
    assert (each.factor, each.wanted) == (name, value)
    assert means in each.means
    assert bool(each.harmless) is harmless
    assert told.fix == each.fix != ""


def launch(**changes: object) -> Launch:
    usual: dict[str, object] = {"result": "none", "artifact": None, "verdict": "cold", "differs": (), "reasons": ()}
    return msgspec.structs.replace(LAUNCH, **(usual | changes))


OTHER = (Difference("env.CI", "set", None, "match"),)
REJECTED = Observation(entries=(Entry("ab/backbone/0", "rejected", "pickle data was truncated"),))
UNREAD = (Factor("device.name", None, "guard"), Factor("device.capability", None, "guard"))
RECORDED: dict[str, tuple[Launch, str, str, str]] = {
    # class: what is recorded, the word, the sentence, what to do
    "denied": (launch(errors={"mirror denied": 1}), "denied", "a store denied access", "cachemgr doctor"),
    "denied one by one": (
        launch(reasons=(f"unreadable capture: cannot read `artifacts/{folder(LAUNCH.key)}/ab.json.zst` in s3://b",)),
        "denied", "a store denied access", "cachemgr doctor",
    ),
    "denied what has another key": (
        launch(reasons=("unreadable capture: cannot read `artifacts/k1-ab/ab.json.zst` in s3://b",)),
        "absent", "the first of its kind", "start it once",
    ),
    "denied, and another is near": (
        launch(result="near", differs=OTHER, errors={"mirror denied": 1}),
        "denied", "this is no miss", "cachemgr doctor",
    ),
    "throttled": (launch(errors={"mirror throttled": 2}), "throttled", "asked to slow down", "cachemgr pull"),
    "unreachable": (launch(errors={"mirror unreachable": 1}), "unreachable", "could not be read", "cachemgr doctor"),
    "deadline": (launch(errors={"looking up": 1, "deadline": 1}), "deadline", "was over", "CACHEMGR_DEADLINE=60"),
    "deadline while restoring": (
        launch(result="exact", artifact=LAUNCH.key, errors={"restoring": 1, "deadline": 1}),
        "deadline", "before everything was in place", "cachemgr pull",
    ),
    "untrusted": (
        launch(errors={"untrusted": 1}, reasons=("untrusted capture: nobody has signed it",)),
        "untrusted", "nobody who is trusted answers for them", "cachemgr sign",
    ),
    "a level that is not read": (launch(errors={"levels ignored": 1}), "untrusted", "nobody who is trusted", "TRUSTED"),
    "quarantined": (
        launch(reasons=("1 capture of this key in quarantine on this host, see `cachemgr show k1`",)),
        "quarantined", "an engine failed with them here", f"cachemgr show {LAUNCH.key[:12]}",
    ),
    "damaged": (launch(reasons=("damaged capture: torn",)), "damaged", "are damaged", "cachemgr rm"),
    "absent": (launch(), "absent", "the first of its kind", "start it once"),
    "guards that cannot be read": (
        launch(factors=(Factor("device", "rocm", "guard"), *UNREAD)),
        "absent", "device.capability, device.name cannot be read", "this torch computes on rocm",
    ),
    "an editable install": (
        launch(factors=(Factor("torch", "2", "guard"), Factor("vllm.code", None, "guard"))),
        "absent", "vllm.code cannot be read", "install it as a wheel",
    ),
    "no driver answers": (
        launch(factors=(Factor("device", None, "guard"), *UNREAD)), "absent", "cannot be read", "nvidia-smi",
    ),
    "a driver that is too old": (
        launch(artifact=LAUNCH.key, reasons=("cuda_runtime 13.0: driver runs 12.8",)),
        "relation", "cuda_runtime 13.0: driver runs 12.8", "cachemgr doctor",
    ),
    "inert": (
        launch(result="exact", artifact=LAUNCH.key, verdict="inert"), "inert", "the engine read none of them", "unset",
    ),
    "rejected": (
        launch(result="exact", artifact=LAUNCH.key, verdict="partly used", observed=REJECTED),
        "rejected", "the engine rejected", "",
    ),
    "grown": (
        launch(result="exact", artifact=LAUNCH.key, verdict="partly used", added={"triton": 7}),
        "added", "something beside it: 7 files", "",
    ),
    "no access times": (
        launch(result="exact", artifact=LAUNCH.key, verdict="unknown"), "unknown", "keeps no access times", "relatime",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDED)
def test_a_recorded_launch_is_explained(kind: str) -> None:
    recorded, word, says_, fix = RECORDED[kind]
    told = of_launch(recorded)
    found = miss(recorded)
    assert found is not None
    assert (told.word, found.word) == (word, word)
    assert says_ in told.says
    assert fix in told.fix
    assert (told.launch, told.host) == (recorded.launch, recorded.host)


def test_a_rejection_is_told_in_the_words_of_the_engine() -> None:
    told = of_launch(RECORDED["rejected"][0])
    assert told.engine == ("the engine rejected ab/backbone/0: pickle data was truncated",)


def test_a_warm_launch_is_no_miss() -> None:
    warm = launch(result="exact", artifact=LAUNCH.key, verdict="used")
    assert miss(warm) is None
    told = of_launch(warm)
    assert (told.word, told.differs, told.fix) == (None, (), "")
    assert told.says.startswith("it was warm")


def test_the_words_of_the_mirror_are_those_that_are_counted() -> None:
    assert {"denied", "throttled"} <= faults.FAULTS.keys()


values = st.none() | st.sampled_from(["a", "b", "sealed:12"])
roles: st.SearchStrategy[Role] = st.sampled_from(["guard", "match", "blind"])
names = st.sampled_from(
    ["env.CI", "env.VLLM_HOST_IP", "flags.dtype", "model", "model.config", "python", "torch", "x", "prefix", "{odd}"]
)
sets = st.dictionaries(names, st.tuples(values, roles)).map(
    lambda found: tuple(Factor(name, value, role) for name, (value, role) in sorted(found.items()))
)


@given(sets, sets)
def test_exactly_the_factors_that_differ_are_named(ours: tuple[Factor, ...], theirs: tuple[Factor, ...]) -> None:
    mine, other = ({factor.name: factor for factor in each} for each in (ours, theirs))
    unknown = {
        name
        for name in mine.keys() & other.keys()
        if mine[name].value is None and "guard" in {mine[name].role, other[name].role}
    }
    expected = {
        name
        for name in mine.keys() | other.keys()
        if name not in mine or name not in other or mine[name].value != other[name].value
    }
    found, told = compared(ours, theirs)
    assert {each.factor for each in told} == expected | unknown
    assert len(told) == len({each.factor for each in told})
    assert all(each.means and each.fix for each in told)
    case = Case(derive(ours), found.result, derive(theirs), found.differs, ours)
    assert account(case, nearest=theirs).differs == (told if theirs and ours else explained(found.differs, ours))


def test_every_factor_of_a_real_launch_has_words_of_its_own(shops: dict[str, Shop], tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    plain = describe(fleet.command("f"), fleet.machine("one").environ, cwd=tmp_path, ignored_args=())
    for factor in (*shops["0.32.0"].profile().factors, *shops["0.26.0"].profile().factors, *plain.factors):
        assert meaning(factor.name) is not MEANINGS[-1], factor.name


ENV: dict[str, object] = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_API_KEY": "(scrubbed)", "VLLM_X": 1}


def note(**changes: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "env": ENV,
        "config_hash": "c1",
        "code_hash": "d1",
        "compiler_hash": "e1",
    }
    return usual | changes


FLAG = (Difference("flags.max-model-len", "4096", "8192", "match"),)


@pytest.mark.parametrize(
    ("theirs", "differs", "said"),
    [
        (note(env={**ENV, "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2"}), (), ("values of VLLM_NIXL_SIDE_CHANNEL_HOST",)),
        (note(env={**ENV, "VLLM_API_KEY": "hunter2"}), (), ()),
        (note(config_hash="c2"), FLAG, ("digest of its configuration differs, by flags.max-model-len",)),
        (note(config_hash="c2"), (), ("nobody can say by what: only digests are known",)),
        (note(code_hash="d2"), (), ("other sources of the model",)),
        (note(compiler_hash="e2"), (Difference("torch", "a", "b", "guard"),), ("torch's compiler differs, by torch",)),
        (note(compiler_hash="e2"), (), ("torch's compiler differs, and only digests are known",)),
        (note(config_hash="c2", code_hash="d2"), (), ("configuration", "code")),
        (note(), (), ()),
        ({"env": "odd"}, (), ("configuration", "code", "compiler")),
    ],
)
def test_two_notes_of_the_engine_are_compared(
    theirs: dict[str, object], differs: tuple[Difference, ...], said: tuple[str, ...]
) -> None:
    told = engine_says(compare_notes(note(), theirs), differs)
    assert len(told) == len(said)
    for line, words in zip(told, said, strict=True):
        assert words in line
        assert "hunter2" not in line


def test_notes_are_read_from_a_layer_and_from_a_live_directory(store: Store, tmp_path: Path) -> None:
    publish_trees(store, build(tmp_path / "live", ["torch_compile"]))
    (capture,) = captures(store, derive(FACTORS), [])
    theirs = of_capture(store, capture.manifest)
    assert theirs.by_model == {"backbone": {"env": {"VLLM_TARGET_DEVICE": "cuda"}, "code_hash": "12"}}
    place = tmp_path / "root/torch_compile_cache/0123456789/rank_0_0/backbone"
    place.mkdir(parents=True)
    (place / "cache_key_factors.json").write_text(json.dumps({"env": {"VLLM_TARGET_DEVICE": "cpu"}, "code_hash": "12"}))
    seen = Observation(compile_directories=("0123456789/backbone/0", "/chosen/by/the/user", "../../x/0"))
    started = launch(observed=seen)
    ours = of_live(str(tmp_path / "root"), started)
    assert says(started, capture.manifest, ours, theirs, ()) == [
        f"vLLM looked for the directory of graphs 0123456789…, and the artifact has {TEN_HEX}…",
        "vLLM hashed other values of VLLM_TARGET_DEVICE",
    ]
    two = {
        name: Notes({"backbone": note(), "eagle_head": note(code_hash=code)}) for name, code in (("a", "1"), ("b", "2"))
    }
    assert says(launch(), capture.manifest, two["a"], two["a"], ()) == ["vLLM's own notes about its key are equal"]
    (line,) = says(launch(), capture.manifest, two["a"], two["b"], ())
    assert line.startswith("vLLM's digest of the model's code differs"), (
        "one model of two is equal, and their key is not"
    )


LINTED: dict[str, tuple[str, Sequence[str], Mapping[str, str], str, str, str]] = {
    # class: version, options, variables, the kind, what it is about, what to do
    "service link": ("0.32.0", (), {"VLLM_PORT": "tcp://10.0.0.1:80"}, "breaks", "VLLM_PORT", "enableServiceLinks"),
    "random id": ("0.32.0", (RANDOM_ID,), {}, "fragments", "--additional-config.worker", "hand ids over"),
    "DEBUG": ("0.32.0", (), {"VLLM_LOGGING_LEVEL": "debug"}, "fragments", "VLLM_LOGGING_LEVEL", "unset"),
    "plugins": ("0.32.0", (), {"VLLM_PLUGINS": "a"}, "fragments", "VLLM_PLUGINS", "unset VLLM_PLUGINS"),
    "pod IP": ("0.32.0", (), {"VLLM_EC_SIDE_CHANNEL_HOST": "::1"}, "fragments", "VLLM_EC_SIDE_CHANNEL_HOST", "unset"),
    "HOME": ("0.26.0", (), {"VLLM_CONFIG_ROOT": "/home/x"}, "fragments", "VLLM_CONFIG_ROOT", "one path"),
    "API key": ("0.26.0", (), {"VLLM_API_KEY": "hunter2"}, "fragments", "VLLM_API_KEY", "--api-key"),
    "CI": ("0.32.0", (), {"CI": "1"}, "fragments", "CI", "on none"),
    "unknown": ("0.32.0", (), {"VLLM_NEW_THING": "1"}, "fragments", "VLLM_NEW_THING", "unset VLLM_NEW_THING"),
    "speculation": (
        "0.32.0", (SPECULATION,), {},
        "poisons", "--speculative-config.num_speculative_tokens", "one VLLM_CACHE_ROOT",
    ),
    "shared directory": ("0.32.0", (), {"TRITON_CACHE_DIR": "/shared"}, "poisons", "TRITON_CACHE_DIR", "unset"),
    "cache_dir": (
        "0.32.0", ('--compilation-config={"cache_dir": "/x"}',), {},
        "poisons", "--compilation-config.cache_dir", "leave it out",
    ),
    "switched off": (
        "0.32.0", (), {"VLLM_DISABLE_COMPILE_CACHE": "1"}, "disables", "VLLM_DISABLE_COMPILE_CACHE", "unset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LINTED)
def test_a_hazard_is_named_with_the_line_that_ends_it(shops: dict[str, Shop], kind: str) -> None:
    version, options, variables, word, about, fix = LINTED[kind]
    shop = shops[version]
    found = {each.about: each for each in hazards(variables, shop.profile(options, variables))}
    assert about in found, found.keys()
    assert found[about].kind == word
    assert fix in found[about].fix
    assert "hunter2" not in str(found)
    clean = {each.about for each in hazards({}, shop.profile())}
    assert about not in clean


def test_a_hub_that_may_be_asked_is_no_hazard(shops: dict[str, Shop]) -> None:
    profile = shops["0.32.0"].profile()
    about = [[each.about for each in hazards({"HF_HUB_OFFLINE": value}, profile)] for value in ("1", "true", "0", "")]
    assert ["HF_HUB_OFFLINE" in each for each in about] == [True, True, False, False]


GENERAL = "capture once with this one: both stay in the store"


@pytest.mark.parametrize(
    ("factor", "stored", "fix"),
    [
        ("env.TORCH_LOGS", "a b", "export TORCH_LOGS='a b'"),
        ("env.TORCH_LOGS", "$(reboot)", "export TORCH_LOGS='$(reboot)'"),
        ("flags.dtype", "half;reboot", "--dtype 'half;reboot'"),
        ("flags.max-model-len", "4096", "--max-model-len 4096"),
        ("flags.max-model-len", None, "leave out --max-model-len"),
        ("flags.enforce-eager", "true", "--enforce-eager"),
        ("flags.enforce-eager", "false", "--no-enforce-eager"),
        ("flags.compilation-config.splitting", "true", "--compilation-config.splitting true"),
        ("env.X;reboot", None, GENERAL),
        ("env.X;reboot", "1", GENERAL),
        ("env.VLLM_X_HOST$(reboot)", "1", GENERAL),
        ("flags.x;reboot", None, GENERAL),
    ],
)
def test_what_is_to_be_typed_can_be_typed_as_it_stands(factor: str, stored: str | None, fix: str) -> None:
    """An artifact of somebody else says the name and the value."""
    (told,) = explained([Difference(factor, "other", stored, "match")])
    assert told.fix == fix


def test_a_version_that_is_none_is_no_failure() -> None:
    """Python turns no more than 4,300 digits into a number."""
    factors = [Factor("torch", "9" * 5000, "guard")]
    (told,) = explained([Difference("env.VLLM_LOGGING_LEVEL", "INFO", "DEBUG", "match")], factors)
    assert told.factor == "env.VLLM_LOGGING_LEVEL"


@pytest.mark.parametrize(("name", "version"), [("VLLM_API_KEY", "0.32.0"), ("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.32.0")])
def test_what_a_version_does_not_hash_is_no_hazard_with_it(shops: dict[str, Shop], name: str, version: str) -> None:
    assert not facts_for(version).variables.get(name)
    variables = {name: "10.0.0.1"}
    assert name not in {each.about for each in hazards(variables, shops[version].profile((), variables))}


@pytest.mark.parametrize(
    ("options", "level", "graphs"),
    [
        ((), "-O2 (default): as 1, with full", "FULL_AND_PIECEWISE (by level)"),
        (("-O1",), "-O1: Dynamo and Inductor", "PIECEWISE (by level): graphs of the parts"),
        (("-O0",), "-O0: no compilation", "NONE (by level): no CUDA graphs"),
        (('--compilation-config={"cudagraph_mode": "FULL"}',), "-O2 (default)", "FULL: one graph of the whole model"),
        (("--enforce-eager",), "--enforce-eager: no compilation and no CUDA graphs", ""),
    ],
)
def test_level_and_graph_mode_say_what_they_turn_on(
    shops: dict[str, Shop], options: tuple[str, ...], level: str, graphs: str
) -> None:
    told = dict(turned_on(shops["0.32.0"].profile(options).factors))
    assert told["level"].startswith(level)
    assert told.get("graphs", "").startswith(graphs)
    assert turned_on(FACTORS) == []


def test_levels_are_told_of_versions_that_were_read() -> None:
    assert known_versions()[0] == "0.26.0"
    assert known_versions()[-1] == "0.33.0", "a new release: look at its OPTIMIZATION_LEVEL tables"


@pytest.mark.parametrize("name", ["unknown", "config", "front-end"])
def test_what_is_no_flag_is_not_told_to_be_left_out(name: str) -> None:
    [told] = explained([Difference(f"flags.{name}", "sealed:1", None, "blind")])
    assert f"leave out --{name}" not in told.fix
    assert told.fix != ""


def test_of_another_engine_nothing_else_is_told() -> None:
    ours, theirs = Factor("engine", "torch", "guard"), Factor("engine", "vllm", "guard")
    case = Case(LAUNCH.key, "none", LAUNCH.key, compare([ours], [theirs]).differs, (ours,))
    told = account(case, nearest=(theirs, Factor("vllm", "0.32.0", "guard"), Factor("model", "m", "match")))
    assert [each.factor for each in told.differs] == ["engine"]
