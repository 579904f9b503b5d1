"""`facts.json` is what the sources of five releases say, and our own tables fit it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachemgr.factors.vllm import flags, harmless, variables
from cachemgr.factors.vllm.facts import Facts, facts_for, known_versions
from cachemgr.sensitive import is_secret

ROOT = Path(__file__).parent.parent
SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES", "")
every_version = pytest.mark.parametrize("version", known_versions())
needs_sources = pytest.mark.skipif(not SOURCES, reason="CACHEMGR_VLLM_SOURCES names no sources (vllm_sources.py)")


@pytest.mark.slow
@needs_sources
def test_the_file_is_what_the_generator_makes_of_the_sources() -> None:
    code = "import sys, vllm_facts, pathlib; sys.stdout.write(vllm_facts.collect(pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, SOURCES], cwd=ROOT / "scripts", capture_output=True, text=True, check=True
    )
    assert done.stdout == (ROOT / "cachemgr/factors/vllm/facts.json").read_text()


@pytest.mark.slow
@needs_sources
@every_version
def test_no_release_can_compile_without_making_an_engine(version: str) -> None:
    """A command that fills the cache without weights is proposed (vllm#38675, #36072); until a release has one,
    `prewarm` makes up weights. When this fails, `cachemgr.prewarm.starting` has something better to start."""
    main = (Path(SOURCES) / version / "vllm/entrypoints/cli/main.py").read_text()
    commands = set(re.findall(r"vllm\.entrypoints\.cli\.([a-z_.]+)", main))
    assert {"serve", "run_batch"} <= commands, "it is read where commands are listed"
    assert not {name for name in commands if re.search("compil|warm|aot", name)}


def test_the_file_is_small() -> None:
    assert (ROOT / "cachemgr/factors/vllm/facts.json").stat().st_size < 150_000


@pytest.mark.parametrize(
    ("version", "read_from", "assumed", "close"),
    [
        ("0.32.0", "0.32.0", False, True),
        ("0.32.0+cu130", "0.32.0", False, True),
        ("v0.31.0", "0.31.0", False, True),
        ("0.31.0.post1", "0.31.0", False, True),
        ("0.31.0.post1+cpu", "0.31.0", False, True),
        ("0.31", "0.31.0", False, True),
        ("0.32.0rc1", "0.32.0", True, True),
        ("0.32.1rc1", "0.32.0", True, True),
        ("0.32.4", "0.32.0", True, True),
        ("0.29.3.dev5+g1abc", "0.28.0", True, False),
        ("0.34.0", "0.33.0", True, False),
        ("1.0.0", "0.33.0", True, False),
        ("0.9.2", "0.26.0", True, False),
        ("nightly", "0.33.0", True, False),
        ("", "0.33.0", True, False),
        (None, "0.33.0", True, False),
    ],
)
def test_a_version_gets_the_nearest_facts_and_is_told_so(
    version: str | None, read_from: str, assumed: bool, close: bool
) -> None:
    facts = facts_for(version)
    assert (facts.version, facts.assumed, facts.close) == (read_from, read_from if assumed else None, close)


@every_version
def test_what_is_known_to_be_hashed_is(version: str) -> None:
    options = facts_for(version).options("serve")
    hashed = ["dtype", "tensor-parallel-size", "quantization", "block-size", "max-num-batched-tokens", "max-lora-rank"]
    assert [name for name in hashed if not options[name].hashed] == []
    unhashed = ["seed", "port", "gpu-memory-utilization", "limit-mm-per-prompt", "enforce-eager", "hf-overrides"]
    assert [name for name in unhashed if options[name].hashed] == []
    assert options["max-num-seqs"].hashed == (version not in {"0.26.0", "0.28.0"})


@every_version
def test_keys_of_configs_are_told_apart(version: str) -> None:
    keys = facts_for(version).keys
    assert keys["compilation-config"]["mode"]
    assert keys["compilation-config"]["pass_config.fuse_norm_quant"]
    assert not keys["compilation-config"]["debug_dump_path"]
    assert not keys["speculative-config"]["num_speculative_tokens"]
    assert keys["speculative-config"]["model"] == (version not in {"0.26.0", "0.28.0"})
    assert keys["attention-config"]["backend"]
    assert not keys["kernel-config"]["enable_flashinfer_autotune"]
    assert not any(keys["kv-transfer-config"].values())


@pytest.mark.parametrize("name", sorted(harmless.HARMLESS))
def test_what_is_called_harmless_exists_and_is_never_hashed(name: str) -> None:
    found = [flag for version in known_versions() for flag in facts_for(version).flags if flag.name == name]
    assert found
    assert not any(flag.hashed for flag in found)
    assert harmless.HARMLESS[name]


@pytest.mark.parametrize(("flag", "key"), sorted(harmless.HARMLESS_KEYS))
def test_what_is_called_a_harmless_key_is_never_hashed(flag: str, key: str) -> None:
    known = [facts_for(version).keys[flag] for version in known_versions() if key in facts_for(version).keys[flag]]
    assert known
    assert not any(keys[key] for keys in known)


@pytest.mark.parametrize("name", sorted({*harmless.DERIVED, *harmless.ONLY_GIVEN, *harmless.AUTO_SIZED}))
def test_other_tables_name_flags_that_exist_unhashed(name: str) -> None:
    for version in known_versions():
        assert not facts_for(version).options("serve")[name].hashed


def test_no_flag_is_in_two_tables() -> None:
    tables = [harmless.HARMLESS, harmless.DERIVED, harmless.ONLY_GIVEN]
    assert len({name for table in tables for name in table}) == sum(map(len, tables))


@every_version
def test_known_names_that_hold_secrets_are_named_one_by_one(version: str) -> None:
    facts = facts_for(version)
    looks = {flag.name for flag in facts.flags if is_secret(flag.name)}
    harmless_words = {name for name in looks if re.search(r"-token(-ids|-threshold)", name)}
    assert looks - harmless_words - {"allow-credentials"} == flags.SECRET
    looks = {name for name in facts.variables if is_secret(name)}
    assert looks - {name for name in looks if name.endswith("_TOKEN_THRESHOLD")} == variables.SECRET


@every_version
def test_every_variable_is_claimed(version: str) -> None:
    assert all(variables.claims(name) for name in facts_for(version).variables)


@pytest.mark.parametrize("name", sorted(variables.SHAPING))
def test_what_shapes_unhashed_is_ignored_by_some_version(name: str) -> None:
    known = [facts_for(version).variables.get(name) for version in known_versions()]
    assert False in known


def getters(version: str) -> Iterator[tuple[str, ast.expr]]:
    tree = ast.parse(Path(SOURCES, version, "vllm", "envs.py").read_text())
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id="environment_variables"), value=ast.Dict(keys=keys, values=values)):
                for key, value in zip(keys, values, strict=True):
                    yield ast.literal_eval(key or ast.Constant(None)), value


@needs_sources
@every_version
def test_hashed_variables_that_default_to_a_place_of_the_user_are_constants(version: str) -> None:
    facts = facts_for(version)
    placed = {name for name, getter in getters(version) if "get_default_" in ast.unparse(getter)}
    assert {name for name in placed if facts.variables[name]} == set(variables.constants(facts, {"HOME": "/nowhere"}))


@needs_sources
@every_version
def test_other_variables_that_a_hashed_one_is_read_from_are_known(version: str) -> None:
    facts = facts_for(version)
    read = {
        other
        for name, getter in getters(version)
        for other in re.findall(r"getenv\('(\w+)'|environ.get\('(\w+)'", ast.unparse(getter))
        if facts.variables[name]
    }
    names = {name for pair in read for name in pair if name}
    assert {name for name in names if not variables.claims(name)} <= {"JAX_PLATFORMS"}


@needs_sources
@every_version
def test_the_parser_still_does_what_ours_mirrors(version: str) -> None:
    source = Path(SOURCES, version, "vllm", "utils", "argparse_utils.py").read_text()
    assert "allow_abbrev" not in source
    assert "dict_args[key]" in source
    assert 'if "--config" in args:' in source
    everything = Path(SOURCES, version, "vllm", "engine", "arg_utils.py").read_text()
    assert "allow_abbrev" not in everything


@needs_sources
@every_version
def test_debug_logging_still_turns_asserts_on(version: str) -> None:
    source = Path(SOURCES, version, "vllm", "config", "compilation.py").read_text()
    assert 'enable_asserts = envs.VLLM_LOGGING_LEVEL == "DEBUG"' in source


def test_facts_are_immutable_and_shared() -> None:
    facts: Facts = facts_for("0.32.0")
    assert facts is facts_for("0.32.0+cpu")
