"""What an image says about itself to tools that know nothing of us.

`io.kserve.km/*` and `cache.vllm.image/*` are what Red Hat's Model Cache Vault writes and KServe's kernel manager reads
(redhat-et/GKM, September 2026, `mcv/docs/spec-compat.md`, `mcv/pkg/cacheplan`). Its labels about mounting
(`cache-root-env`, `cache-mount-subpath`, `cache-mounts`) are left out on purpose: they promise that an engine can read
the mounted tree as it is, while our files name their own directory by a mark that a restore replaces, and vLLM dies of
an index that names nothing. Without them such a consumer declines the image.
"""

from collections.abc import Sequence

import msgspec

from cachemgr.capture import LAYOUT, Manifest
from cachemgr.key import Key
from cachemgr.store.captures import Capture

OURS = "io.cachemgr."
LAYOUT_LABEL = f"{OURS}layout"
"""By this an image is known as one of ours; the layout of the store in it."""
KEY_LABEL = f"{OURS}key"
_LABEL_BYTES = 4096
"""What one label may have (redhat-et/GKM `MaxLabelBytes`)."""
_WARP = {"cuda": 32, "hip": 64}


def labels(key: Key, captures: Sequence[Capture]) -> dict[str, str]:
    """The labels of an artifact with these captures, of which there is at least one; the oldest comes first."""
    first = captures[0].manifest
    ours = {
        LAYOUT_LABEL: str(LAYOUT),
        KEY_LABEL: key,
        f"{OURS}engine": first.engine,
        f"{OURS}engine-version": first.engine_version or "unknown",
        f"{OURS}model": first.model,
        f"{OURS}device": first.device,
        f"{OURS}captures": str(len(captures)),
        "org.opencontainers.image.title": f"compile cache of {first.model} on {first.device}",
        "org.opencontainers.image.created": created(captures),
    }
    found = ours | (_of_vault(captures) if first.engine == "vllm" else {})
    return {name: _within(value) for name, value in found.items()}


def created(captures: Sequence[Capture]) -> str:
    """When the newest of them was made: an image of equal captures is the same whenever it is exported."""
    return max(capture.manifest.created for capture in captures)


def architecture(manifest: Manifest) -> str:
    """Go's name of the processor that the captures are for (`amd64`, `arm64`), which container runtimes compare."""
    machine = next((factor.value for factor in manifest.factors if factor.name == "platform"), None) or ""
    return "arm64" if "aarch64" in machine or "arm64" in machine else "amd64"


def _of_vault(captures: Sequence[Capture]) -> dict[str, str]:
    """In the words of the Model Cache Vault."""
    manifests = [capture.manifest for capture in captures]
    units = [unit for manifest in manifests for _layer, section in manifest.sections() for unit in section.units]
    entries = sorted({entry for manifest in manifests for entry in manifest.entries})
    found = {
        "io.kserve.km/framework": "vllm",
        "io.kserve.km/cache-type": "torch-compile",
        "cache.vllm.image/entry-count": str(len(entries)),
        "cache.vllm.image/cache-size-bytes": str(sum(file.size for unit in units for file in unit.files)),
        "cache.vllm.image/format": "cachemgr",
    }
    if entries:
        found["io.kserve.km/cache-hash"] = ",".join(entries)
    targets = _targets(manifests[0])
    if targets:
        found["cache.vllm.image/summary"] = msgspec.json.encode({"targets": targets}, order="sorted").decode()
    return found


def _targets(manifest: Manifest) -> list[dict[str, object]]:
    """The GPUs that the artifact is for. The architecture is the compute capability that was read from the device, and
    never made up from a CUDA version."""
    values = {factor.name: factor.value for factor in manifest.factors}
    backend, capability = values.get("device"), values.get("device.capability")
    if backend not in _WARP or not capability:
        return []
    kinds = sorted({each.strip().replace(".", "") for each in capability.split(",")})
    return [{"backend": backend, "arch": kind, "warp_size": _WARP[backend]} for kind in kinds]


def _within(value: str) -> str:
    return value.encode()[:_LABEL_BYTES].decode(errors="ignore")
