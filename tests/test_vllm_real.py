"""Our flags and variables against a real vLLM: what it parses, and what its own hashes contain.

Equal factors must mean equal hashes, or an exact artifact would not be found by the engine. All questions go to one
process (`tests/programs/vllm_hashes.py`), because importing vLLM takes longer than asking it.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from cachemgr.factors.vllm import flags as flag_words
from cachemgr.factors.vllm import variables
from cachemgr.factors.vllm.arguments import flags_of
from cachemgr.factors.vllm.facts import Facts, Flag, facts_for
from cachemgr.key import Factor

PYTHON = os.environ.get("CACHEMGR_VLLM_PYTHON", "")
ROOT = Path(__file__).parent.parent
PROGRAM = Path(__file__).parent / "programs" / "vllm_hashes.py"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="CACHEMGR_VLLM_PYTHON names no interpreter with vLLM"),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 256,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip

# Command lines of one meaning each.
MEANINGS = [
    ["", "-O2", "-O3", "-O 3", "-tp 1", "--tensor_parallel_size=1", "--dtype auto", "--no-enforce-eager",
     "--revision None", "--max-lora-rank 16", "--seed 7", "--served-model-name a b", "--port 9 --host ::1",
     "--gpu-memory-utilization 0.5", "--disable-log-stats", "--stream-interval 4", "--scheduling-policy priority",
     "--tokenizer-mode auto --tokenizer {model}", "--skip-tokenizer-init", "--num-gpu-blocks-override 64",
     "--kv-cache-memory-bytes 1G", "--master-port 5 --master-addr 127.0.0.2",
     "--shutdown-timeout 3", "--headless", "--api-server-count 0", "--log-level DEBUG", "--default-mm-loras {{}}"],
    ["-tp 2", "-tp=2", "--tensor-parallel-size=2", "--tensor_parallel_size 2", "--tensor-par 2", "-tp 4 -tp 2"],
    ["-O1", "-O 1", "-O=1", "--optimization_level=1"],
    ["-O0", "--optimization-level 0"],
    ["--enforce-eager", "--enforce_eager", "--no-enforce-eager --enforce-eager"],
    ["--max-model-len 1024", "--max-model-len 1K", "--max_model_len=1K", "--max-model-len=1.024k"],
    ["--max-num-batched-tokens 8K --max-num-seqs 8", "--max-num-seqs=8 --max-num-batched-tokens=8192"],
    ["-cc.cudagraph_mode=NONE", "--compilation-config.cudagraph_mode NONE", '-cc={{"cudagraph_mode":"NONE"}}',
     '-cc {{"mode":0}} -cc.cudagraph_mode=NONE'],
    ["-cc.custom_ops+ +rms_norm,-silu_and_mul", "-cc.custom_ops+=+rms_norm -cc.custom_ops+=-silu_and_mul"],
    ["-cc.pass_config.fuse_norm_quant true", '-cc {{"pass_config":{{"fuse_norm_quant":true}}}}'],
    ["-cc.max_cudagraph_capture_size 1k", "-cc.max_cudagraph_capture_size=1000"],
    ["--max-logprobs 5", "--max_logprobs=5"],
    ["--no-enable-chunked-prefill --max-num-batched-tokens 8k",
     "--no-enable_chunked_prefill --max-num-batched-tokens 8k"],
    ["--enable-lora", "--enable-lora --lora-modules a=/x", "--enable-lora --max-cpu-loras 3",
     "--enable-lora --max-loras 1"],
    ["--enable-lora --max-lora-rank 8", "--max-lora-rank=8 --enable-lora"],
    ['--additional-config {{"a":1,"b":2}}', '--additional-config {{"b":2,"a":1}}'],
    ["--kv-cache-dtype fp8", "--kv_cache_dtype=fp8"],
    ["-tp 2 -pp 2", "--config {file}", "-pp 2 --config {file}"],
    ["-tp 4 -pp 2", "--config {file} -tp 4", "-tp 4 --config {file}"],
    ["--block-size 32", "--block-size=32"],
    ["--generation-config vllm", "--generation_config=vllm"],
    ["--no-enable-prefix-caching"],
    ["--kv-cache-dtype-skip-layers 0 1", "--kv_cache_dtype_skip_layers 0 1 --seed 1"],
    ["-q fp8", "-qfp8", "--quantization=fp8"],
]  # fmt: skip


NOISE = (
    " --seed 3 --gpu-memory-utilization 0.7 --disable-log-stats --prefix-caching-hash-algo sha256_cbor --uds /s"
    " --safetensors-load-strategy lazy --mm-processor-cache-gb 1 --jit-monitor-verbose --enable-mfu-metrics"
    " --kv-cache-metrics --watermark 0.1 --max-num-queued-reqs 9 --use-tqdm-on-load --download-dir /d"
    " --ignore-patterns x"
)


class Answer(msgspec.Struct, frozen=True):
    config: str | None = None
    environment: str | None = None
    error: str | None = None
    carries: bool = True
    """Whether what the plugin leaves in a configuration for workers on other machines reaches them, unhashed."""
    asked: dict[str, object] = {}
    """What the plugin would tell of its `EngineArgs`."""


class Options(msgspec.Struct, frozen=True):
    version: str
    options: list[tuple[str, list[str], str, str, list[str]]]


Question = tuple[list[str] | None, dict[str, str]]


def run(arguments: Sequence[str], asked: bytes) -> bytes:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CACHEMGR_ROOT": str(ROOT)}
    done = subprocess.run(
        [PYTHON, str(PROGRAM), *arguments], input=asked, capture_output=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout


def ask(questions: Sequence[Question]) -> list[Answer]:
    answers = msgspec.json.decode(run([], json.dumps(questions).encode()), type=list[Answer])
    assert all(answer.carries for answer in answers)
    return answers


@pytest.fixture(scope="module")
def known() -> Options:
    return msgspec.json.decode(run(["options"], b""), type=Options)


@pytest.fixture(scope="module")
def facts(known: Options) -> Facts:
    return facts_for(known.version)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "file.yaml").write_text("tensor-parallel-size: 2\npipeline_parallel_size: 2\n")
    return made


def key_of(words: list[str], facts: Facts) -> tuple[Factor, ...]:
    return flag_words.factors(flag_words.parse(words, facts, "serve", Path("/")), facts)


def test_its_parser_has_exactly_our_flags(known: Options, facts: Facts) -> None:
    ours = facts.options("serve")
    assert {name[2:] for name, *_ in known.options} == set(ours)
    for name, spelled, action, nargs, _ in known.options:
        flag = ours[name[2:]]
        assert spellings(flag) == set(spelled)
        assert kind(action, nargs) == flag.takes.rstrip("?").replace("pair", "switch") or kind(action, nargs) == "one"


def spellings(flag: Flag) -> set[str]:
    found = {f"--{flag.name}", *flag.aliases}
    if flag.takes in {"switch", "pair"}:
        found |= {"--no-" + word[2:] for word in found if word.startswith("--")}
    return found


def kind(action: str, nargs: str) -> str:
    if action in {"BooleanOptionalAction", "EnableDisableAction"}:
        return "switch"
    by_nargs = {"+": "many", "?": "optional", "0": "flag"}
    return "append" if action == "_AppendAction" else by_nargs.get(nargs, "one")


def test_one_meaning_is_one_key_and_one_hash(facts: Facts, model: Path) -> None:
    lines = [
        [
            [str(model), *text.format(model=model, file=model / "file.yaml").split()]
            for text in (*group, group[0] + NOISE)
        ]
        for group in MEANINGS
    ]
    answers = iter(ask([(words, {}) for group in lines for words in group]))
    seen: dict[tuple[Factor, ...], str | None] = {}
    for group in lines:
        told = [(words, next(answers)) for words in group]
        assert {" ".join(words): answer.error for words, answer in told if answer.error} == {}
        assert len({answer.config for _, answer in told}) == 1, told
        keys = {key_of(words, facts) for words in group}
        assert len(keys) == 1, keys
        assert keys.isdisjoint(seen)
        seen[keys.pop()] = told[0][1].config


def test_a_program_asks_in_the_words_of_the_command_line(facts: Facts, model: Path) -> None:
    """What `EngineArgs` hold after the command line was read has the factors of that command line."""
    lines = [[str(model), *text.format(model=model, file=model / "file.yaml").split()] for text, *_ in MEANINGS]
    for words, answer in zip(lines, ask([(words, {}) for words in lines]), strict=True):
        assert answer.error is None
        ours = flag_words.factors(flags_of(answer.asked, facts), facts)
        parsed = msgspec.structs.replace(flag_words.parse(words, facts, "serve", Path("/")), front_end="LLM")
        assert ours == flag_words.factors(parsed, facts), words


def test_equal_keys_mean_equal_hashes_for_every_flag(known: Options, facts: Facts, model: Path) -> None:
    choices = {name[2:]: found for name, *_, found in known.options}
    lines = [[str(model)]]
    for name, flag in facts.options("serve").items():
        if name not in {"model", "config", "grpc"}:
            lines += [[str(model), *words] for words in given(flag, choices[name])]
    answers = ask([(words, {}) for words in lines])
    hashes: dict[tuple[Factor, ...], dict[str, list[str]]] = {}
    for words, answer in zip(lines, answers, strict=True):
        if answer.config is not None:
            hashes.setdefault(key_of(words, facts), {}).setdefault(answer.config, []).append(" ".join(words[1:]))
    assert [found for found in hashes.values() if len(found) > 1] == []
    answered = sum(answer.error is None for answer in answers)
    assert answered > 0.8 * len(lines), [(line, answer.error) for line, answer in zip(lines, answers, strict=True)]


def given(flag: Flag, choices: list[str]) -> list[list[str]]:
    """Ways to give a flag another value than its default."""
    takes, name = flag.takes.rstrip("?"), f"--{flag.name}"
    if takes == "flag":
        return [[name]]
    if takes in {"switch", "pair"}:
        return [[name], [f"--no-{flag.name}"]]
    if choices:
        return [[name, choice] for choice in choices]
    if takes in {"int", "human", "human-auto"}:
        usual = flag.default if isinstance(flag.default, int) else 63
        return [[name, str(usual + 1)]]
    values = {"float": ["0.5"], "json": ["{}", '{"a":1}'], "json-or-text": ["{}", '{"a":1}']}
    return [[name, value] for value in values.get(takes, ["x"])]


def test_equal_keys_mean_equal_hashes_for_every_variable(facts: Facts) -> None:
    environs = [{name: value} for name in sorted(facts.variables) for value in ("", "0", "1", "2", "x", "/q")]
    environs += [
        {name: "/q"} for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR", "CXX", "CI", "HF_HOME")
    ]
    environs += [{"JAX_PLATFORMS": "proxy,cpu"}, {"VLLM_PRECOMPILED_WHEEL_LOCATION": "/q"}]
    answers = ask([(None, {}), *[(None, environ) for environ in environs]])
    base = answers[0].environment
    unseen = [
        environ
        for environ, answer in zip(environs, answers[1:], strict=True)
        if answer.environment != base and not variables.factors(environ, facts)
    ]
    assert unseen == []


def test_other_logging_changes_no_hash(facts: Facts, model: Path) -> None:
    environs = [{}, {"VLLM_LOGGING_LEVEL": "WARNING"}, {"VLLM_LOGGING_COLOR": "1"}]
    answers = ask([([str(model)], environ) for environ in environs])
    assert answers == [answers[0]] * 3
    assert [variables.factors(environ, facts) for environ in environs] == [()] * 3
