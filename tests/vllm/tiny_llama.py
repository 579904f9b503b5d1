"""Make a model that vLLM serves without any network: a Llama of a few layers, its weights and a tokenizer.

    python tests/vllm/tiny_llama.py DIRECTORY [LAYERS]

Needs nothing but Python; the same arguments give the same bytes. The weights are drawn so that the likeliest token is
likelier by far than the next: greedy answers do not hang on the last bit of a sum.
"""

import json
import random
import sys
from array import array
from pathlib import Path

HIDDEN, HEADS, HEAD, INNER, POSITIONS = 64, 2, 32, 128, 512
WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(61))]


def main() -> None:
    directory, layers = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    directory.mkdir(parents=True, exist_ok=True)
    for name, document in {
        "config.json": config(layers),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (directory / name).write_text(json.dumps(document, indent=1) + "\n")
    write_safetensors(directory / "model.safetensors", shapes(layers))


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "vocab_size": len(WORDS),
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tokenizer() -> dict[str, object]:
    """One token per word, in the format of the `tokenizers` library (0.23, WordLevel)."""
    special = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, word in enumerate(WORDS[:3])
    ]
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]},
    }


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": WORDS[0],
        "bos_token": WORDS[1],
        "eos_token": WORDS[2],
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}",
    }


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama checkpoint, by their names there."""
    attention = HEADS * HEAD
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(WORDS), HIDDEN)}
    for layer in range(layers):
        found |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (attention, HIDDEN),
                "self_attn.k_proj": (attention, HIDDEN),
                "self_attn.v_proj": (attention, HIDDEN),
                "self_attn.o_proj": (HIDDEN, attention),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (len(WORDS), HIDDEN)}


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Eight bytes of length, a JSON header, then little-endian floats."""
    draw = random.Random(7)
    header: dict[str, object] = {}
    data = bytearray()
    for name, shape in tensors.items():
        norm = len(shape) == 1
        count = shape[0] if norm else shape[0] * shape[1]
        values = array("f", [1.0] * count if norm else [draw.gauss(0, 0.2) for _ in range(count)])
        if sys.byteorder == "big":
            values.byteswap()
        start = len(data)
        data += values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


if __name__ == "__main__":
    main()
