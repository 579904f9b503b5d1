"""Flags of vLLM: one meaning is one factor however it is spelled, another meaning is another factor."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.factors.vllm import flags as flag_words
from cachemgr.factors.vllm import harmless
from cachemgr.factors.vllm.facts import Facts, Flag, facts_for, known_versions
from cachemgr.factors.vllm.flags import Flags
from cachemgr.key import Factor

FACTS = facts_for("0.32.0")
every_version = pytest.mark.parametrize("version", known_versions())


def parse(words: str | list[str], front_end: str = "serve", cwd: Path = Path("/"), facts: Facts = FACTS) -> Flags:
    return flag_words.parse(words.split() if isinstance(words, str) else words, facts, front_end, cwd)


def factors(words: str | list[str], facts: Facts = FACTS, front_end: str = "serve") -> tuple[Factor, ...]:
    return flag_words.factors(parse(words, front_end, facts=facts), facts)


def shown(words: str | list[str], facts: Facts = FACTS) -> dict[str, tuple[str | None, str]]:
    return {each.name.removeprefix("flags."): (each.value, each.role) for each in factors(words, facts)}


@pytest.mark.parametrize(
    "spellings",
    [
        ["m -tp 2", "m -tp=2", "m --tensor-parallel-size 2", "m --tensor-parallel-size=2", "m --tensor_parallel_size 2",
         "m --tensor_parallel-size=2", "m --tensor-par 2", "m -tp 4 -tp 2", "--model m -tp 2", "--model=m -tp 2",
         "-tp 2 --model m", "m -pp 1 -tp 2"],
        ["m -O1", "m -O 1", "m -O=1", "m --optimization-level 1", "m --optimization_level=1"],
        ["m", "m -O2", "m -O3", "m -O 3", "m --revision None", "m -tp 1", "m --dtype auto", "m --no-enforce-eager",
         "m --port 9 --host ::1 --seed 7 --api-key hunter2", "m --served-model-name a b", "--served-model-name a -- m"],
        ["m --max-model-len 4096", "m --max-model-len 4K", "m --max_model_len=4K", "m --max-model-len=4.096k"],
        ["m --max-model-len -1", "m --max-model-len auto", "m --max-model-len=AUTO", "m --max-model-len=-1"],
        ["m --max-num-batched-tokens 8K", "m --max-num-batched-tokens=8192"],
        ["m -q fp8", "m -qfp8", "m -q=fp8", "m --quantization fp8"],
        ["m --no-enable-chunked-prefill", "m --enable-chunked-prefill --no-enable-chunked-prefill",
         "m --no-enable_chunked_prefill"],
        ["m --kv-offloading-size 1", "m --kv-offloading-size 1.0"],
        ["m -cc.mode=3", "m -cc.mode 3", "m --compilation-config.mode 3", "m --compilation_config.mode=3",
         'm --compilation-config {"mode":3}', 'm -cc {"cudagraph_mode":"NONE"} -cc.mode=3',
         'm -cc={"mode":0} -cc {"mode":3}'],
        ["m -cc.pass_config.fuse_norm_quant true", 'm -cc.pass_config {"fuse_norm_quant":true}',
         'm -cc {"pass_config":{"fuse_norm_quant":true}}'],
        ["m -cc.custom_ops+ +a,-b", "m -cc.custom_ops+=+a -cc.custom_ops+=-b", 'm -cc {"custom_ops":["+a","-b"]}'],
        ["m -cc.max_cudagraph_capture_size 1k", 'm -cc {"max_cudagraph_capture_size":1k}',
         "m -cc.max_cudagraph_capture_size=1000"],
        ["m --cudagraph-capture-sizes 1 2 4", "m --cudagraph-capture-sizes=9 --cudagraph-capture-sizes 1 2 4",
         "--cudagraph-capture-sizes 1 2 4 --model m"],
        ["m --enable-lora --lora-modules a=/x b=/y", "m --enable-lora --lora-modules c=/z", "m --enable-lora"],
        ["m -dp 2 -dpn 0", "m -dp 2 -dpn 1", "m -dp 2 --data-parallel-rank=0"],
    ],
)  # fmt: skip
def test_spellings_of_one_meaning_are_equal(spellings: list[str]) -> None:
    assert {words: factors(words) for words in spellings} == dict.fromkeys(spellings, factors(spellings[0]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("m -tp 2", "m -tp 4"),
        ("m -O1", "m -O2"),
        ("m --max-model-len 4k", "m --max-model-len 4K"),
        ("m -cc.mode=3", "m -cc.mode=2"),
        ("m", "m --enforce-eager"),
        ("m --enable-lora", "m"),
        ("m -dpn 0 -dp 2", "m -dp 2"),
        ("m --new-flag 1", "m --new-flag 2"),
        ("m --new-flag", "m"),
        ('m --kv-transfer-config {"engine_id":"a"}', "m"),
        ("m -cc.custom_ops+ +a", "m -cc.custom_ops+ +b"),
    ],
)
def test_another_meaning_is_another_key(ours: str, theirs: str) -> None:
    assert factors(ours) != factors(theirs)


@pytest.mark.parametrize(
    ("words", "name", "value", "role"),
    [
        ("m -tp 2", "tensor-parallel-size", "2", "match"),
        ("m -O0", "optimization-level", "0", "match"),
        ("m --enforce-eager", "enforce-eager", "true", "match"),
        ("m --async-scheduling", "async-scheduling", "true", "blind"),
        ('m --limit-mm-per-prompt {"image":0}', "limit-mm-per-prompt.image", "0", "blind"),
        ("m -sc.num_speculative_tokens=7", "speculative-config.num_speculative_tokens", "7", "blind"),
        ('m --speculative-config {"model":"d"}', "speculative-config.model", "d", "match"),
        ("m --mm-encoder-tp-mode data", "mm-encoder-tp-mode", "data", "blind"),
        ("m -cc.mode=3", "compilation-config.mode", "3", "match"),
        ("m -cc.pass_config.fuse_norm_quant true", "compilation-config.pass_config.fuse_norm_quant", "true", "match"),
        ("m -cc.cache_dir /c", "compilation-config.cache_dir", "/c", "blind"),
        ('m --additional-config {"a":1}', "additional-config.a", "1", "match"),
        ("m --attention-config.backend=FLASH_ATTN", "attention-config.backend", "FLASH_ATTN", "match"),
        ("m --kernel-config.enable_jit_warmup=false", "kernel-config.enable_jit_warmup", "false", "blind"),
        ("m -dp 2 -dpr 1", "data-parallel-start-rank", "given", "blind"),
        ("m --dbo-decode-token-threshold 9", "dbo-decode-token-threshold", "9", "match"),
    ],
)  # fmt: skip
def test_roles_follow_what_the_engine_hashes(words: str, name: str, value: str, role: str) -> None:
    assert shown(words)[name] == (value, role)


def test_a_draft_model_is_blind_where_its_hash_depends_on_the_method() -> None:
    words = 'm --speculative-config {"model":"d"}'
    assert shown(words, facts_for("0.28.0"))["speculative-config.model"] == ("d", "blind")


def test_facts_that_are_only_assumed_make_everything_blind() -> None:
    assert shown("m -tp 2", facts_for("0.45.0"))["tensor-parallel-size"] == ("2", "blind")
    assert shown("m -tp 2", facts_for("0.33.1"))["tensor-parallel-size"] == ("2", "match")


def test_memory_counts_where_the_longest_sequence_is_made_from_it() -> None:
    assert "gpu-memory-utilization" not in shown("m --gpu-memory-utilization 0.5")
    assert shown("m --max-model-len auto --gpu-memory-utilization 0.5")["gpu-memory-utilization"] == ("0.5", "blind")


def test_addresses_inside_of_a_config_do_not_count() -> None:
    pod = 'm --kv-transfer-config {"kv_connector":"N","engine_id":"%s","kv_ip":"%s"}'
    assert factors(pod % ("a", "10.0.0.1")) == factors(pod % ("b", "10.0.0.2"))
    assert shown(pod % ("a", "10.0.0.1")) == {"kv-transfer-config.kv_connector": ("N", "blind")}


@pytest.mark.parametrize(
    "words",
    [
        "m --api-key hunter2", "m --api-key=hunter2", "m --hf-token hunter2", "m --hf_token=hunter2",
        "m --api-key hunter2 hunter2", "m --new-password hunter2", "m --new-secret=hunter2",
        'm --kv-transfer-config {"kv_connector_extra_config":{"password":"hunter2"}}',
        'm --additional-config {"x":"hunter2"}', 'm --additional-config {"access_token":"hunter2"}',
        'm --hf-overrides {"x":"hunter2"}', "m --new-flag hunter2",
    ],
)  # fmt: skip
def test_a_secret_never_enters_a_factor(words: str) -> None:
    assert "hunter2" not in repr(factors(words))


def test_unknown_secrets_do_not_count_and_other_unknown_words_do() -> None:
    assert factors("m --new-secret=a") == factors("m --new-secret=b")
    assert factors("m --new-secret a") == factors("m --new-secret b")
    assert factors("m --new-flag a") != factors("m --new-flag b")
    assert {factor.role for factor in factors("m --new-flag a")} == {"blind"}


def test_values_nobody_knows_are_sealed() -> None:
    ours, theirs = (
        flag_words.factors(parse('m --additional-config {"x":' + value), FACTS) for value in ('"a"}', '"b"}')
    )
    assert ours != theirs
    assert (ours[0].value or "").startswith("sealed:")


@pytest.mark.parametrize(
    ("words", "front_end", "model"),
    [
        ("m", "serve", "m"), ("--model m", "serve", "m"), ("-tp 2 --model=m", "serve", "m"), ("-tp 2 m", "serve", "m"),
        ("-- m", "serve", "m"), ("--model m", "run-batch", "m"), ("", "serve", None), ("-tp 2", "bench latency", None),
    ],
)  # fmt: skip
def test_the_model(words: str, front_end: str, model: str | None) -> None:
    assert parse(words, front_end).model == model


def test_a_value_may_look_like_an_option_only_if_it_is_a_number_or_has_a_space() -> None:
    assert parse("m --max-model-len -1").values == {"max-model-len": "-1"}
    assert parse(["m", "--revision", "-a b"]).values == {"revision": "-a b"}
    assert parse("m --revision -a").unknown == ("--revision", "-a")


def test_what_the_parser_would_refuse_is_kept() -> None:
    assert parse("m --max-model 1 --max- 5").unknown == ("--max-", "5")
    assert parse("m more").unknown == ("more",)
    assert shown('m --compilation-config {"mode":')["compilation-config"] == ('{"mode":', "blind")


def test_pairs_switch_off_by_their_other_word_where_the_version_knows_it() -> None:
    new = facts_for("0.33.0")
    assert parse("m --disable-chunked-prefill", facts=new).values == {"enable-chunked-prefill": "false"}
    assert parse("m --enable-custom-all-reduce", facts=new).values == {}
    assert parse("m --disable-chunked-prefill").unknown == ("--disable-chunked-prefill",)


class TestConfigFile:
    def file(self, tmp_path: Path, text: str, name: str = "c.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    def test_it_says_what_words_say(self, tmp_path: Path) -> None:
        name = self.file(
            tmp_path,
            "model: m\ntensor-parallel-size: 2\nenforce_eager: true\nenable-chunked-prefill: false\n"
            "cudagraph-capture-sizes: [1, 2]\ncompilation-config:\n  pass_config: {fuse_norm_quant: true}\n",
        )
        found = parse(f"--config {name}", cwd=tmp_path)
        words = "m -tp 2 --enforce-eager --no-enable-chunked-prefill --cudagraph-capture-sizes 1 2"
        assert found == parse([*words.split(), "-cc.pass_config.fuse_norm_quant=true"])

    def test_the_command_line_wins(self, tmp_path: Path) -> None:
        name = self.file(tmp_path, "model: other\ntensor-parallel-size: 2\npipeline_parallel_size: 2\n")
        for words in (f"m -tp 4 --config {name}", f"m --config {name} -tp 4", f"--model m --config {name} -tp 4"):
            found = parse(words, cwd=tmp_path)
            assert (found.model, found.values) == ("m", {"pipeline-parallel-size": "2", "tensor-parallel-size": "4"})

    def test_one_behind_an_equals_sign_is_not_read(self, tmp_path: Path) -> None:
        name = self.file(tmp_path, "tensor-parallel-size: 2\n")
        assert factors("m") == flag_words.factors(parse(f"m --config={name}", cwd=tmp_path), FACTS)

    @pytest.mark.parametrize("text", ["[1]", "a: [", "", "!!python/object:os.system {}"])
    def test_one_that_cannot_be_read_counts_as_such(self, tmp_path: Path, text: str) -> None:
        found = parse(f"m --config {self.file(tmp_path, text)}", cwd=tmp_path)
        assert found.config_file is not None
        assert Factor("flags.config", "unreadable", "blind") in flag_words.factors(found, FACTS)

    def test_one_that_is_absent(self, tmp_path: Path) -> None:
        assert parse("m --config c.yaml", cwd=tmp_path).config_file is not None

    def test_a_pipe_is_left_to_the_engine(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "c.yaml")
        assert parse("m --config c.yaml", cwd=tmp_path).config_file == "c.yaml: no file that can be read"


def test_a_model_is_left_to_its_own_module() -> None:
    assert factors("m") == factors("other")


def test_a_front_end_has_defaults_of_its_own() -> None:
    ours, theirs = factors("--model m", front_end="bench latency"), factors("--model m", front_end="bench throughput")
    assert Factor("flags.front-end", "bench latency", "match") in ours
    assert Factor("flags.enable-prefix-caching", "false", "blind") in ours
    assert theirs == (Factor("flags.front-end", "bench throughput", "match"),)
    assert factors("--model m", facts_for("0.28.0"), "run-batch")[0].role == "blind"


def test_undecodable_bytes_become_text() -> None:
    for factor in factors(["m", "--revision", "a\udcff", "--x\udcfe", "-cc.backend=\udcfd"]):
        (factor.value or "").encode()
        factor.name.encode()


# Properties

HASHED = sorted(name for name, flag in FACTS.options("serve").items() if flag.hashed and name != "model")


def values_of(flag: Flag) -> st.SearchStrategy[str]:
    takes = flag.takes.rstrip("?")
    if takes in {"int", "human", "human-auto"}:
        return st.integers(2, 10**6).map(str)
    if takes == "float":
        return st.floats(0.5, 64, allow_nan=False).map(repr)
    if takes.startswith("json"):
        return st.dictionaries(st.sampled_from("abc"), st.integers(0, 9) | st.sampled_from(["x", "y"])).map(json.dumps)
    return st.text("abcdefgh/_", min_size=2, max_size=8)


@st.composite
def options(draw: st.DrawFn, names: list[str] = HASHED) -> tuple[Flag, str]:
    flag = FACTS.options("serve")[draw(st.sampled_from(names))]
    return flag, draw(values_of(flag))


def words_of(flag: Flag, value: str) -> list[str]:
    if flag.takes in {"flag", "switch", "pair"}:
        return [f"--{flag.name}"] if len(value) % 2 or flag.takes == "flag" else [f"--no-{flag.name}"]
    return [f"--{flag.name}", value]


@st.composite
def spelled(draw: st.DrawFn, given_: tuple[Flag, str]) -> list[str]:
    """A spelling of an option."""
    name, *rest = words_of(*given_)
    if name.startswith("--no-"):
        return ["--no-" + name[5:].replace("-", draw(st.sampled_from("-_")))]
    if rest and given_[0].aliases and draw(st.booleans()):
        name = given_[0].aliases[0]
    if name.startswith("--"):
        name = "--" + name[2:].replace("-", draw(st.sampled_from("-_")))
    joined = bool(rest) and draw(st.booleans())
    return [f"{name}={rest[0]}"] if joined else [name, *rest]


@given(st.lists(options(), max_size=6, unique_by=lambda option: option[0].name), st.data())
def test_spelling_and_order_never_change_factors(chosen: list[tuple[Flag, str]], data: st.DataObject) -> None:
    plain = [word for option in chosen for word in words_of(*option)]
    shuffled = data.draw(st.permutations(chosen))
    other = [word for option in shuffled for word in data.draw(spelled(option))]
    noise = data.draw(st.lists(st.sampled_from([["--seed", "3"], ["--port=1"], ["-n", "1"]]), max_size=2))
    assert factors(["m", *plain]) == factors(["m", *other, *[word for words in noise for word in words]])


@given(options(), st.data())
def test_any_change_of_a_hashed_flag_changes_factors(option: tuple[Flag, str], data: st.DataObject) -> None:
    flag, value = option
    if flag.takes.rstrip("?") in {"flag", "switch", "pair"}:
        assert factors(["m", f"--{flag.name}"]) != factors(["m", f"--no-{flag.name}"])
        return
    other = data.draw(values_of(flag).filter(lambda each: each != value))
    same = flag.takes.startswith("json") and json.loads(value) == json.loads(other)
    assert (factors(["m", f"--{flag.name}", value]) == factors(["m", f"--{flag.name}", other])) == same


@given(st.sampled_from(sorted(set(harmless.HARMLESS) & set(FACTS.options("serve")) - {"config"})), st.data())
def test_no_value_of_a_harmless_flag_counts(name: str, data: st.DataObject) -> None:
    flag = FACTS.options("serve")[name]
    assert factors(["m", *words_of(flag, data.draw(values_of(flag)))]) == factors("m")


@given(st.lists(st.text('-=.+O{}"m_tp1 \udcff', max_size=8), max_size=6))
def test_no_words_make_it_stumble(words: list[str]) -> None:
    for factor in factors(words):
        factor.name.encode()


@every_version
def test_every_flag_of_every_version_can_be_given(version: str) -> None:
    facts = facts_for(version)
    for front_end in ("serve", "run-batch", "grpc", "bench latency", "bench throughput"):
        for name, flag in facts.options(front_end).items():
            alone = flag.takes.rstrip("?") in {"flag", "switch", "pair", "optional"}
            found = parse([f"--{name}"] if alone else [f"--{name}", "7"], front_end, facts=facts)
            assert found.unknown == (), name
