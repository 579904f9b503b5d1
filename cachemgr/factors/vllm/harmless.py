"""Flags of vLLM that count for nothing: unhashed, and unable to shape what is compiled. Each has its reason beside it.

A flag is here only if no version that we know hashes the field it feeds (a test compares with `facts.json`) and no
hashed field is derived from it. Everything else that is unhashed is `blind`. Kept out on purpose:
`enable-prefix-caching` (mamba models derive hashed fields from it, `config/vllm.py`), `load-format` and
`model-loader-extra-config` (some loaders quantize), `enable-layerwise-nvtx-tracing` (hooks inside of the traced model),
`limit-mm-per-prompt` and `mm-processor-kwargs` (which branches of a multimodal model run), `nnodes` (which fusions a
collective allows), `distributed-executor-backend` (sets variables that Inductor hashes, on the CPU).
"""


def _table(rows: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in rows.items() for name in names.split()}


HARMLESS: dict[str, str] = _table(
    {
        "where a server listens": "host port uds root-path grpc grpc-port url h11-max-header-count "
        "h11-max-incomplete-event-size data-parallel-supervisor-port dp-supervisor-probe-interval-s "
        "dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold sse-keep-alive-interval",
        "who may talk to a server, and how its answers are framed": "api-key allow-credentials allowed-origins "
        "allowed-methods allowed-headers ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers "
        "enable-ssl-refresh middleware enable-request-id-headers disable-fastapi-docs enable-offline-docs "
        "fingerprint-mode fingerprint-value",
        "how many processes answer": "api-server-count headless",
        "what is logged or measured": "uvicorn-log-level disable-uvicorn-access-log disable-access-log-for-endpoints "
        "log-config-file log-error-stack max-log-len enable-log-outputs enable-log-deltas enable-log-requests "
        "disable-log-stats aggregate-engine-logging enable-metrics enable-prompt-tokens-details "
        "enable-per-request-metrics enable-server-load-tracking enable-force-include-usage "
        "enable-tokenizer-info-endpoint show-hidden-metrics-for-version otlp-traces-endpoint "
        "collect-detailed-traces log-level logging-config kv-cache-metrics kv-cache-metrics-sample "
        "cudagraph-metrics enable-mfu-metrics "
        "enable-logging-iteration-details custom-histogram-buckets per-request-spec-decode-metrics "
        "jit-monitor-mode jit-monitor-verbose kv-events-config",
        "text around the model: names, templates, parsers": "served-model-name chat-template "
        "chat-template-content-format trust-request-chat-template trust-request-mm-kwargs "
        "default-chat-template-kwargs response-role return-tokens-as-token-ids enable-auto-tool-choice "
        "exclude-tools-when-tool-choice-none tool-call-parser tool-parser-plugin tool-strict-level tool-server "
        "cohere-is-reasoning-model cohere-format anthropic-disabled-thinking-effort reasoning-effort-map "
        "reasoning-parser reasoning-parser-plugin tokenizer tokenizer-mode tokenizer-revision skip-tokenizer-init "
        "interleave-mm-strings",
        "adapters are weights; rank, count and target modules have flags of their own": "lora-modules lora-path "
        "lora-assignment default-mm-loras max-cpu-loras",
        "where weights come from and how they are read": "download-dir ignore-patterns use-tqdm-on-load "
        "safetensors-load-strategy safetensors-prefetch-num-threads safetensors-prefetch-block-size "
        "pt-load-map-location max-parallel-loading-workers hf-token",
        "which local files a request may name": "allowed-local-media-path allowed-media-domains",
        "how many blocks the cache has; their number is no constant of a graph (config/cache.py)": ""
        "gpu-memory-utilization kv-cache-memory-bytes num-gpu-blocks-override",
        "names of cached blocks and of cached inputs": "prefix-caching-hash-algo mm-hasher-algorithm "
        "mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-tensor-ipc",
        "which request runs when": "scheduling-policy stream-interval max-num-queued-reqs max-num-queued-tokens "
        "watermark shutdown-timeout",
        "random numbers": "seed",
        "where ranks meet; how many there are has flags of its own": "master-addr master-port data-parallel-address "
        "data-parallel-rpc-port",
        "which part of a world this node is; its ranks and ordinals are relations (world.py)": "node-rank "
        "data-parallel-size-local device-ids",
        "near which memory a process runs": "numa-bind numa-bind-nodes numa-bind-cpus",
        "whether a mistake is an error": "fail-on-environ-validation",
        "the file itself; what it says counts like the command line": "config",
        "what a benchmark sends": "input-file output-file output-tmp-dir max-inflight input-len output-len batch-size "
        "n use-beam-search num-iters num-iters-warmup profile output-json disable-detokenize dataset dataset-name "
        "dataset-path no-oversample enable-multimodal-chat custom-output-len num-prompts num-warmups hf-subset "
        "hf-split hf-name hf-max-batch-size prefix-len prefix-repetition-prefix-len prefix-repetition-suffix-len "
        "prefix-repetition-num-prefixes prefix-repetition-output-len asr-min-audio-len-sec asr-max-audio-len-sec "
        "prequeue-requests case shapes iters samples profile-dir kv-len-jitter kv-init",
    }
)

HARMLESS_KEYS: dict[tuple[str, str], str] = {
    ("kv-transfer-config", "engine_id"): "a name, random by default (config/kv_transfer.py)",
    ("kv-transfer-config", "kv_ip"): "an address of this launch",
    ("kv-transfer-config", "kv_port"): "an address of this launch",
    ("kv-transfer-config", "kv_rank"): "which of the instances this is",
    ("ec-transfer-config", "engine_id"): "a name, random by default (config/ec_transfer.py)",
    ("ec-transfer-config", "ec_ip"): "an address of this launch",
    ("ec-transfer-config", "ec_port"): "an address of this launch",
    ("ec-transfer-config", "ec_rank"): "which of the instances this is",
    ("compilation-config", "debug_dump_path"): "where graphs are dumped; ignored by compute_hash",
}
"""Keys of flags that take JSON: unhashed and harmless, by flag and key."""

AUTO_SIZED = frozenset({"gpu-memory-utilization", "kv-cache-memory-bytes", "num-gpu-blocks-override"})
"""Harmless, unless the longest sequence is derived from them: `--max-model-len auto` makes a hashed field of them."""

DERIVED: dict[str, str] = {
    "enforce-eager": "sets compilation mode and cudagraph mode, which are hashed (config/vllm.py)",
    "optimization-level": "sets fields of the compilation config, which are hashed (config/vllm.py)",
    "enable-lora": "decides whether there is a LoRA config, whose hash or absence is hashed (config/vllm.py)",
}
"""Unhashed themselves, but what they set is hashed in every version that we know: a difference is `match`."""

ONLY_GIVEN: dict[str, str] = {
    "data-parallel-rank": "chooses external load balancing; which rank it is differs from node to node",
    "data-parallel-start-rank": "chooses hybrid load balancing; which rank it is differs from node to node",
}
"""Flags of which only counts that they are given, as `blind`."""
