"""Which model a vLLM launch loads: the string that the engine hashes, and what configures it on this machine."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cachemgr.factors.vllm.facts import facts_for
from cachemgr.factors.vllm.flags import Draft, parse, role_of_draft
from cachemgr.factors.vllm.model import _CONFIGS, Model, factors, model
from cachemgr.key import compare

SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES")
PYTHON = os.environ.get("CACHEMGR_VLLM_PYTHON")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}

needs_sources = pytest.mark.skipif(SOURCES is None, reason="CACHEMGR_VLLM_SOURCES names no sources of vLLM")


def ask(
    cwd: Path,
    name: str,
    revision: str | None = None,
    config_path: str | None = None,
    vllm: str | None = None,
    hub: str | None = None,
    draft: str | None = None,
    draft_revision: str | None = None,
    **environ: str,
) -> Model:
    return model(
        name,
        revision=revision,
        environ={"HOME": str(cwd / "home"), **environ},
        cwd=cwd,
        hf_config_path=config_path,
        draft=None if draft is None else Draft(draft, draft_revision),
        vllm_version=vllm,
        hub_version=hub,
    )


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def local(folder: Path, **more: object) -> Path:
    write(folder / "config.json", {**CONFIG, **more})
    return folder


def cached(hub: Path, repository: str, *, commit: str = COMMIT, ref: str | None = "main", **more: object) -> Path:
    """A repository in a hub cache; its snapshot."""
    storage = hub / f"models--{repository.replace('/', '--')}"
    if ref is not None:
        write(storage / "refs" / ref, commit)
    return local(storage / "snapshots" / commit, **more)


def default_hub(cwd: Path) -> Path:
    return cwd / "home" / ".cache" / "huggingface" / "hub"


def test_a_local_path_is_hashed_as_it_is_spelled(tmp_path: Path) -> None:
    local(tmp_path / "m")
    spellings = ["m", "./m", "m/", str(tmp_path / "m")]
    assert [ask(tmp_path, name).hashed for name in spellings] == spellings
    assert len({ask(tmp_path, name).config for name in spellings}) == 1


def test_a_tilde_is_no_home_to_vllm(tmp_path: Path) -> None:
    local(tmp_path / "home" / "m")
    assert ask(tmp_path, "~/m").hashed == "~/m"
    assert ask(tmp_path, "~/m").config is None


def test_online_a_hub_id_stays_and_its_snapshot_configures_it(tmp_path: Path) -> None:
    snapshot = cached(default_hub(tmp_path), "org/m")
    found = ask(tmp_path, "org/m")
    assert found.hashed == "org/m"
    assert found.config == ask(tmp_path, str(snapshot)).config is not None


def test_a_model_that_is_not_here_yet_has_no_digest(tmp_path: Path) -> None:
    found = ask(tmp_path, "org/m")
    assert found == Model("org/m", None, "org/m")
    assert [factor.name for factor in factors(found, draft="match")] == ["model"]


@pytest.mark.parametrize(
    ("environ", "offline"),
    [
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "true"}, True),
        ({"HF_HUB_OFFLINE": "YES"}, True),
        ({"HF_HUB_OFFLINE": "on"}, True),
        ({"TRANSFORMERS_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, False),
        ({"HF_HUB_OFFLINE": "2"}, False),
        ({"HF_DATASETS_OFFLINE": "1"}, False),
    ],
)
def test_offline_a_hub_id_becomes_its_snapshot(tmp_path: Path, environ: dict[str, str], offline: bool) -> None:
    snapshot = cached(default_hub(tmp_path), "org/m")
    assert ask(tmp_path, "org/m", **environ).hashed == (str(snapshot) if offline else "org/m")


def test_offline_paths_and_missing_models_stay(tmp_path: Path) -> None:
    local(tmp_path / "org" / "m")
    cached(default_hub(tmp_path), "org/m")
    for name in ("org/m", "org/missing", "/nowhere/a/b", "", "s", "..", "a\0b"):
        assert ask(tmp_path, name, HF_HUB_OFFLINE="1").hashed == name


@pytest.mark.parametrize(
    ("place", "environ"),
    [
        ("home/.cache/huggingface/hub", {}),
        ("x/huggingface/hub", {"XDG_CACHE_HOME": "{}/x"}),
        ("h/hub", {"HF_HOME": "{}/h", "XDG_CACHE_HOME": "{}/x"}),
        ("old", {"HUGGINGFACE_HUB_CACHE": "{}/old", "HF_HOME": "{}/h"}),
        ("new", {"HF_HUB_CACHE": "{}/new", "HUGGINGFACE_HUB_CACHE": "{}/old"}),
        ("home/h/hub", {"HF_HOME": "~/h"}),
        ("v/hub", {"HF_HOME": "$PLACE/v", "PLACE": "{}"}),
        ("v/hub", {"HF_HOME": "${{PLACE}}/v", "PLACE": "{}"}),
        ("relative/hub", {"HF_HOME": "relative"}),
    ],
)
def test_the_hub_cache_is_where_huggingface_hub_keeps_it(tmp_path: Path, place: str, environ: dict[str, str]) -> None:
    snapshot = cached(tmp_path / place, "org/m")
    named = {name: value.format(tmp_path) for name, value in environ.items()}
    assert ask(tmp_path, "org/m", HF_HUB_OFFLINE="1", **named).hashed == str(snapshot)


@pytest.mark.parametrize(("hub", "resolved"), [("1.21.0", False), ("0.36.0", False), ("1.22.0", True), (None, True)])
def test_newer_hubs_resolve_their_cache_directory(tmp_path: Path, hub: str | None, resolved: bool) -> None:
    snapshot = cached(tmp_path / "real" / "hub", "org/m")
    (tmp_path / "link").symlink_to("real")
    for spelled in (str(tmp_path / "link"), "link"):
        found = ask(tmp_path, "org/m", hub=hub, HF_HOME=spelled, HF_HUB_OFFLINE="1")
        assert found.hashed == (str(snapshot) if resolved else f"{spelled}/hub/models--org--m/snapshots/{COMMIT}")
        assert found.config is not None


def test_a_revision_is_a_reference_or_a_commit(tmp_path: Path) -> None:
    first = cached(default_hub(tmp_path), "org/m")
    second = cached(default_hub(tmp_path), "org/m", commit=OTHER, ref="refs/pr/1", hidden_size=32)
    asked = {revision: ask(tmp_path, "org/m", revision, HF_HUB_OFFLINE="1") for revision in ("refs/pr/1", OTHER)}
    assert {found.hashed for found in asked.values()} == {str(second)}
    assert ask(tmp_path, "org/m", "main", HF_HUB_OFFLINE="1").hashed == str(first)
    assert ask(tmp_path, "org/m", "v2", HF_HUB_OFFLINE="1").hashed == "org/m"
    assert ask(tmp_path, "org/m", OTHER).config != ask(tmp_path, "org/m").config


@pytest.mark.parametrize("url", ["s3://bucket/m", "S3://Bucket/m", "gs://bucket/m", "az://account/m", "s3://b/m/"])
def test_object_storage_is_hashed_as_the_directory_that_it_is_pulled_into(tmp_path: Path, url: str) -> None:
    digits = hashlib.sha256(url.encode()).hexdigest()[:8]
    found = ask(tmp_path, url, HF_HUB_OFFLINE="1")
    assert found.hashed == f"{tmp_path}/home/.cache/vllm/assets/model_streamer/{digits}"
    assert (found.config, found.label) == (None, url)
    assert ask(tmp_path, url, XDG_CACHE_HOME="/c").hashed == f"/c/vllm/assets/model_streamer/{digits}"
    assets = tmp_path / "home" / "a"
    local(assets / "model_streamer" / digits)
    pulled = ask(tmp_path, url, VLLM_ASSETS_CACHE="~/a")
    assert pulled.hashed == f"{assets}/model_streamer/{digits}"
    assert pulled.config is not None


def test_a_speculators_checkpoint_gives_way_to_its_verifier(tmp_path: Path) -> None:
    cached(default_hub(tmp_path), "org/target")
    draft = local(tmp_path / "draft", speculators_config={"verifier": {"name_or_path": "org/target"}})
    found = ask(tmp_path, "draft", HF_HUB_OFFLINE="1")
    assert found.hashed == "org/target"
    assert found.config == ask(tmp_path, "org/target").config is not None
    local(draft, speculators_config={"verifier": {"name_or_path": "org/target"}}, draft_vocab_size=8)
    assert ask(tmp_path, "draft").draft != found.draft is not None


def test_how_many_tokens_a_speculators_checkpoint_drafts_is_in_no_hash(tmp_path: Path) -> None:
    """It was part of `model.config`, so a graph for three tokens was restored for a start with five."""
    made = []
    for tokens in (3, 5):
        methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
        said = {"verifier": {"name_or_path": "org/target"}, "proposal_methods": methods}
        local(tmp_path / "draft", speculators_config=said)
        made.append(factors(ask(tmp_path, "draft"), draft="match"))
    comparison = compare(*made)
    assert [(each.factor, each.role) for each in comparison.differs] == [("model.draft", "blind")]


@pytest.mark.parametrize("broken", [None, 1, [], {}, {"verifier": None}, {"verifier": {"name_or_path": 3}}])
def test_a_strange_speculators_configuration_is_none(tmp_path: Path, broken: object) -> None:
    local(tmp_path / "m", speculators_config=broken)
    assert ask(tmp_path, "m").hashed == "m"


@pytest.mark.parametrize("text", ['{"org/m": "/srv/m", "n": 1}', "a b c\norg/m   /srv/m\n\nlonely\n"])
def test_a_redirect_file_renames_models(tmp_path: Path, text: str) -> None:
    redirect = str(write(tmp_path / "redirect", text))
    assert ask(tmp_path, "org/m", VLLM_MODEL_REDIRECT_PATH=redirect).hashed == "/srv/m"
    assert ask(tmp_path, "org/m", VLLM_MODEL_REDIRECT_PATH="redirect").hashed == "/srv/m"
    for name in ("org/other", "n", "a"):
        assert ask(tmp_path, name, VLLM_MODEL_REDIRECT_PATH=redirect).hashed == name


@pytest.mark.parametrize("text", ["", "[]", '{"org/m": ["x"]}', '{"org/m": ""}', "\udcff org/m"])
def test_a_strange_redirect_file_renames_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "redirect").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert ask(tmp_path, "org/m", VLLM_MODEL_REDIRECT_PATH="redirect").hashed == "org/m"
    assert ask(tmp_path, "org/m", VLLM_MODEL_REDIRECT_PATH="missing").hashed == "org/m"


def test_the_configuration_may_come_from_elsewhere(tmp_path: Path) -> None:
    for name, size in (("m", 64), ("one", 1), ("two", 2)):
        local(tmp_path / name, hidden_size=size)
    asked = [ask(tmp_path, "m", config_path=path) for path in (None, "m", "one", "two")]
    assert {found.hashed for found in asked} == {"m"}
    assert len({found.config for found in asked}) == 3
    write(tmp_path / "m" / "quantize_config.json", {"bits": 4})
    assert ask(tmp_path, "m", config_path="one").config != asked[2].config
    write(tmp_path / "redirect", "far two")
    there = ask(tmp_path, "m", config_path="far", VLLM_MODEL_REDIRECT_PATH="redirect")
    assert there.config == ask(tmp_path, "m", config_path="two").config


@pytest.mark.parametrize(
    ("value", "vllm", "used"),
    [
        ("True", None, True),
        ("1", "0.33.0", True),
        ("1", "0.26.0", False),
        (" true ", "0.28.0", True),
        ("no", None, False),
    ],
)
def test_modelscope_is_not_the_hub(tmp_path: Path, value: str, vllm: str | None, used: bool) -> None:
    snapshot = cached(default_hub(tmp_path), "org/m")
    found = ask(tmp_path, "org/m", vllm=vllm, VLLM_USE_MODELSCOPE=value, HF_HUB_OFFLINE="1")
    assert found.hashed == ("org/m" if used else str(snapshot))
    assert (found.config is None) == used


def test_spelling_of_json_does_not_count_and_its_content_does(tmp_path: Path) -> None:
    write(tmp_path / "m" / "config.json", '{"a": 1, "b": [1.0, "\\u00e4"]}')
    plain = ask(tmp_path, "m").config
    write(tmp_path / "m" / "config.json", '{\n  "b": [1.0, "ä"],\n  "a": 1\n}\n')
    assert ask(tmp_path, "m").config == plain is not None
    for other in ('{"a": 2, "b": [1.0, "ä"]}', '{"a": 1, "b": ["ä", 1.0]}', '{"a": 1}'):
        write(tmp_path / "m" / "config.json", other)
        assert ask(tmp_path, "m").config != plain


@pytest.mark.parametrize("name", [*sorted(_CONFIGS - {"config.json"}), "modeling_own.py"])
def test_every_file_that_configures_the_model_counts(tmp_path: Path, name: str) -> None:
    digests = [ask(tmp_path, str(local(tmp_path / "m"))).config]
    for content in ("{}", '{"a": 1}'):
        write(tmp_path / "m" / name, content)
        digests.append(ask(tmp_path, "m").config)
    assert len(set(digests)) == 3


def test_weights_tokenizers_and_readmes_do_not_count(tmp_path: Path) -> None:
    before = ask(tmp_path, str(local(tmp_path / "m"))).config
    for name in ("README.md", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "vocab.json"):
        write(tmp_path / "m" / name, "{}")
    write(tmp_path / "m" / "generation_config.json", {"temperature": 0.6})
    write(tmp_path / "m" / "tokenizer_config.json", {"chat_template": "x"})
    assert ask(tmp_path, "m").config == before
    write(tmp_path / "m" / "tokenizer_config.json", {"model_max_length": 512})
    assert ask(tmp_path, "m").config != before


@pytest.mark.parametrize(
    ("named", "found"), [(["A", "B"], ("A", "B")), (["A", 3, None], ("A",)), ("A", ()), (None, ()), ({"A": 1}, ())]
)
def test_architectures_are_those_of_the_configuration(tmp_path: Path, named: object, found: tuple[str, ...]) -> None:
    local(tmp_path / "m", architectures=["Other"])
    local(tmp_path / "c", architectures=named)
    assert ask(tmp_path, "m", config_path="c").architectures == found
    assert ask(tmp_path, "missing").architectures == ()


def test_a_mistral_model_needs_no_config_json(tmp_path: Path) -> None:
    write(tmp_path / "m" / "params.json", {"dim": 64})
    assert ask(tmp_path, "m").config is not None
    write(tmp_path / "n" / "preprocessor_config.json", {})
    assert ask(tmp_path, "n").config is None


def test_code_in_another_repository_counts(tmp_path: Path) -> None:
    local(
        tmp_path / "m", auto_map={"AutoConfig": "org/code--configuration.Own", "AutoModel": "modeling.Own", "x": None}
    )
    before = ask(tmp_path, "m").config
    code = cached(default_hub(tmp_path), "org/code")
    write(code / "configuration.py", "a = 1\n")
    after = ask(tmp_path, "m").config
    write(code / "configuration.py", "a = 2\n")
    assert len({before, after, ask(tmp_path, "m").config}) == 3


def test_a_single_file_is_known_by_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03")
    first = ask(tmp_path, "m.gguf", HF_HUB_OFFLINE="1")
    assert (first.hashed, first.label) == ("m.gguf", "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x04")
    assert first.config != ask(tmp_path, "m.gguf").config is not None


def test_a_quantisation_in_the_name_belongs_to_the_string(tmp_path: Path) -> None:
    cached(default_hub(tmp_path), "org/m-GGUF")
    found = ask(tmp_path, "org/m-GGUF:Q4_K_M")
    assert found.hashed == found.label == "org/m-GGUF:Q4_K_M"
    assert found.config is not None


def nothing(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("missing")


@pytest.mark.parametrize("hostile", [os.mkfifo, nothing, loop, dangling])
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "modeling_own.py", "tokenizer_config.json"])
def test_what_is_no_file_is_not_read(tmp_path: Path, name: str, hostile: Callable[[Path], None]) -> None:
    before = ask(tmp_path, str(local(tmp_path / "m"))).config
    (tmp_path / "m" / name).unlink(missing_ok=True)
    hostile(tmp_path / "m" / name)
    assert ask(tmp_path, "m").config == (None if name == "config.json" else before)


def test_a_huge_file_is_known_by_its_size_and_beginning(tmp_path: Path) -> None:
    path = write(tmp_path / "m" / "config.json", "{}")
    os.truncate(path, 5 << 30)
    first = ask(tmp_path, "m").config
    os.truncate(path, (5 << 30) + 1)
    assert first != ask(tmp_path, "m").config is not None


@pytest.mark.parametrize(
    "text", ["", "not JSON", "[" * 100_000, "\x00\x01", "1" * 10_000, '"\\ud800"', "NaN", "[1e999]"]
)
def test_what_is_no_json_counts_by_its_bytes(tmp_path: Path, text: str) -> None:
    write(tmp_path / "m" / "config.json", text)
    first = ask(tmp_path, "m").config
    write(tmp_path / "m" / "config.json", text + "!")
    assert first != ask(tmp_path, "m").config is not None


def test_a_file_without_permission_is_unknown(tmp_path: Path) -> None:
    path = local(tmp_path / "m") / "config.json"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert ask(tmp_path, "m").config is None


def test_a_loop_of_links_in_the_cache_is_survived(tmp_path: Path) -> None:
    hub = default_hub(tmp_path)
    hub.mkdir(parents=True)
    (hub / "models--org--m").symlink_to("models--org--m")
    assert ask(tmp_path, "org/m", HF_HUB_OFFLINE="1") == Model("org/m", None, "org/m")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("org/m", "org/m"),
        ("./here", "here"),
        ("here/", "here"),
        (f"/h/hub/models--org--a--b/snapshots/{COMMIT}", "org/a--b"),
        ("s3://bucket/m", "s3://bucket/m"),
        ("s3://key:secret@bucket/m?token=x", "s3://***@bucket/m?***"),
        ("\udcff", "\\udcff"),
    ],
)
def test_people_read_a_short_name(tmp_path: Path, name: str, label: str) -> None:
    local(tmp_path / "here")
    assert ask(tmp_path, name).label == label


@pytest.mark.parametrize(
    "name",
    [
        "s3://AKIA:hunter2@bucket/m",
        "s3://AKIA:hun/hunter2/x@bucket/m",
        "s3://AKIA:a?hunter2@bucket/m",
        "s3://bucket/m?token=hunter2",
        "s3://bucket/m?token=a@hunter2",
        "https://me:hunter2@hub.example/m",
        "https://hub.example/m?X-Amz-Signature=hunter2&b=@c",
        "https://hub.example/m?a=1?hunter2",
    ],
)
def test_secrets_of_a_url_are_in_no_factor(tmp_path: Path, name: str) -> None:
    for environ in ({}, {"HF_HUB_OFFLINE": "1"}):
        found = ask(tmp_path, name, **environ)
        assert "hunter2" not in repr((found, factors(found, draft="match")))
    write(tmp_path / "redirect", {"m": name})
    redirected = ask(tmp_path, "m", VLLM_MODEL_REDIRECT_PATH="redirect")
    assert "hunter2" not in repr((redirected, factors(redirected, draft="match")))


def test_factors_are_matched(tmp_path: Path) -> None:
    made = factors(ask(tmp_path, str(local(tmp_path / "m"))), draft="blind")
    assert [(factor.name, factor.role) for factor in made] == [("model", "match"), ("model.config", "match")]


def test_a_draft_counts_by_its_own_configuration(tmp_path: Path) -> None:
    name, draft = str(local(tmp_path / "m")), str(local(tmp_path / "d"))
    one = ask(tmp_path, name, draft=draft)
    local(tmp_path / "d", num_hidden_layers=3)
    other = ask(tmp_path, name, draft=draft)
    assert one.draft != other.draft
    assert one.config == other.config == ask(tmp_path, name).config
    made = factors(one, draft="blind")
    assert [(factor.name, factor.role) for factor in made[1:]] == [("model.config", "match"), ("model.draft", "blind")]
    assert ask(tmp_path, name, draft="ngram").draft is None, "not a model, or not here yet"


def test_a_draft_of_the_hub_is_the_snapshot_of_its_revision(tmp_path: Path) -> None:
    name, hub = str(local(tmp_path / "m")), tmp_path / "home" / ".cache" / "huggingface" / "hub"
    cached(hub, "org/d")
    cached(hub, "org/d", commit=OTHER, ref="next", num_hidden_layers=3)
    revisions = (None, "main", "next", "gone")
    found = [ask(tmp_path, name, draft="org/d", draft_revision=revision).draft for revision in revisions]
    assert found[0] == found[1] != found[2]
    assert None not in found[:3]
    assert found[3] is None


@pytest.mark.parametrize(
    "words",
    [
        '--speculative-config={"method":"eagle","model":"d","revision":"r","num_speculative_tokens":2}',
        "--speculative-config.method=eagle --speculative-config.model=d --speculative-config.revision=r",
        "-sc.model=d -sc.revision=r",
        "--spec-method=eagle --spec-model=d -sc.revision=r",
    ],
)
def test_each_spelling_names_the_draft(tmp_path: Path, words: str) -> None:
    flags = parse(["m", *words.split()], facts_for("0.32.0"), "serve", tmp_path)
    assert flags.draft == Draft("d", "r")
    assert parse(["m", "-sc.num_speculative_tokens=2"], facts_for("0.32.0"), "serve", tmp_path).draft is None


def test_a_draft_is_blind_where_the_engine_leaves_it_out_of_its_hash() -> None:
    releases = ("0.26.0", "0.28.0", "0.31.0", "0.33.0")
    assert [role_of_draft(facts_for(release)) for release in releases] == ["blind", "blind", "match", "match"]


# JSON files that the sources below name and that shape nothing that is compiled; see the comment at `_CONFIGS`.
NOT_COUNTED = {
    "adapter_config.json",
    "added_tokens.json",
    "config_sentence_transformers.json",
    "decision_config.json",  # 0.33: thresholds of a pooling head
    "modules.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "weight_names.json",
}


def releases() -> list[Path]:
    assert SOURCES is not None
    found = sorted(place / "vllm" for place in Path(SOURCES).iterdir() if (place / "vllm").is_dir())
    assert found
    return found


def source(release: Path, name: str) -> str:
    return (release / name).read_text()


@needs_sources
def test_no_configuration_file_of_the_real_sources_is_forgotten() -> None:
    rooms = ("config", "transformers_utils", "model_executor/model_loader", "model_executor/layers/quantization")
    for release in releases():
        text = "".join(path.read_text() for room in rooms for path in (release / room).rglob("*.py"))
        named = set(re.findall(r"[\"']([\w-]+\.json)[\"']", text))
        assert named - _CONFIGS - NOT_COUNTED == set(), release


@needs_sources
def test_the_order_of_replacements_is_the_one_of_the_real_sources() -> None:
    for release in releases():
        arguments, config = source(release, "engine/arg_utils.py"), source(release, "config/model.py")
        offline = arguments.index("self.model = get_model_path(self.model, self.revision)")
        assert "if huggingface_hub.constants.HF_HUB_OFFLINE:" in arguments[offline - 500 : offline]
        assert offline < arguments.index("maybe_override_with_speculators(") < arguments.index("= model_config.model\n")
        redirect = config.index("self.model = maybe_model_redirect(self.model)")
        pull = config.index("self.maybe_pull_model_tokenizer_for_runai(self.model, self.tokenizer)")
        assert redirect < pull < config.index("self.hf_config_path or self.model,")
        assert '"model",' not in config[config.index("ignored_factors = {") : redirect]


@needs_sources
def test_object_storage_and_modelscope_are_those_of_the_real_sources() -> None:
    for release in releases():
        pulled = source(release, "transformers_utils/runai_utils.py")
        assert 'SUPPORTED_SCHEMES = ["s3://", "gs://", "az://"]' in pulled
        assert 'get_cache_dir(),\n            "model_streamer",\n            hashlib.sha256(str(url)' in pulled
        assert ".hexdigest()[:8]" in pulled
        old = 'os.environ.get("VLLM_USE_MODELSCOPE", "False").lower() == "true"' in source(release, "envs.py")
        assert old == (tuple(map(int, release.parent.name.split("."))) < (0, 28))


REAL = """\
import json, sys, types
streamer = types.ModuleType("runai_model_streamer")
def pull_files(path, folder, allow, ignore):
    open(folder + "/config.json", "w").write(open("m/config.json").read())
streamer.pull_files, streamer.list_safetensors = pull_files, None
sys.modules["runai_model_streamer"] = streamer
from vllm.engine.arg_utils import EngineArgs
answer = []
for name, revision, config_path in json.loads(sys.argv[1]):
    arguments = EngineArgs(model=name, revision=revision, hf_config_path=config_path)
    answer.append(arguments.create_model_config().model)
print("ANSWER" + json.dumps(answer))
"""


@pytest.mark.vllm
@pytest.mark.skipif(PYTHON is None, reason="CACHEMGR_VLLM_PYTHON names no Python with vLLM")
def test_the_string_is_the_one_of_the_real_engine(tmp_path: Path) -> None:
    assert PYTHON is not None
    local(tmp_path / "m"), local(tmp_path / "renamed")
    cached(tmp_path / "real" / "hub", "org/m")
    cached(tmp_path / "real" / "hub", "org/m", commit=OTHER, ref="v2")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "redirect", {"renamed": "m", str(tmp_path / "nowhere"): "x"})
    environ = {
        "HOME": str(tmp_path / "home"),
        "HF_HOME": "link",
        "HF_HUB_OFFLINE": "1",
        "VLLM_MODEL_REDIRECT_PATH": "redirect",
        "VLLM_ASSETS_CACHE": "~/assets",
    }
    asked: list[tuple[str, str | None, str | None]] = [
        ("m", None, None),
        ("./m/", None, None),
        (str(tmp_path / "m"), None, None),
        ("org/m", None, None),
        ("org/m", "v2", None),
        ("org/m", OTHER, "m"),
        ("renamed", None, None),
        ("s3://key:secret@bucket/m", None, None),
    ]
    done = subprocess.run(
        [PYTHON, "-c", REAL, json.dumps(asked)],
        env={**environ, "PATH": os.environ["PATH"], "VLLM_TARGET_DEVICE": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    assert [ask(tmp_path, name, revision, path, **environ).hashed for name, revision, path in asked] == answer
