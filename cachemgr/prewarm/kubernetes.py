"""A spec as Jobs of Kubernetes: one Job for each kind and number of GPUs, with a pod for each entry.

Jobs are indexed, so that each entry has its own pod, retries and verdict, and the cluster is the scheduler. A pod runs
the command that a person would run on that node, for a spec of its entry alone, which lies in a ConfigMap. What is
compiled goes to the mirror before the pod ends.

Fields as in Kubernetes 1.29 and later: `backoffLimitPerIndex`, and a pod failure policy that does not repeat an entry
that failed by itself, while a pod whose node went away costs it nothing.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, count

import msgspec

from cachemgr import documents
from cachemgr.errors import UsageError
from cachemgr.spec import Entry, Spec, dump

GPU = "nvidia.com/gpu"
"""The resource of NVIDIA's device plugin, and the taint of its nodes."""
PRODUCT = "nvidia.com/gpu.product"
"""The label that GPU feature discovery gives a node: the name that NVML says, with dashes for blanks."""
_DEVICE_NAME = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce) .+")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,26}[a-z0-9])?")
"""With the kind of GPU and an index behind it, it must be the name of a pod, which is a host name."""
_CONFIG_BYTES = 1_000_000
"""What a ConfigMap takes (1 MiB), with room for its names."""
_RETRIES = 3
_KEPT_SECONDS = 7 * 24 * 3600
_GRACE_SECONDS = 1800
"""What a pod may take beside the limit of its entry: its image is pulled, and its captures are sent."""
_USER = 10001
_LABELS = {"app.kubernetes.io/name": "cachemgr", "app.kubernetes.io/component": "prewarm"}


class Cluster(msgspec.Struct, frozen=True):
    """What a person decides about the Jobs."""

    image: str
    """With the engine and cachemgr in it, as it will serve: other versions have other artifacts."""
    environ: Mapping[str, str]
    """Settings of cachemgr for the pods, such as CACHEMGR_MIRROR."""
    name: str = "cachemgr-prewarm"
    namespace: str | None = None
    service_account: str | None = None
    """Whose identity may write the mirror."""
    secret: str | None = None
    """A Secret whose keys become variables."""
    words: tuple[str, ...] = ()
    """Options of `cachemgr prewarm` for every entry."""
    parallel: int = 4
    """Pods of each Job at a time."""
    cpu: str = "8"
    memory: str = "64Gi"
    products: Mapping[str, str] = {}
    """The label of nodes by the `gpu` of entries, where that is no whole name."""


def manifests(spec: Spec, cluster: Cluster) -> str:
    """The ConfigMap and the Jobs, as YAML.

    Raises:
        UsageError: no node can be told from the GPU of an entry, a name cannot be one, or the spec is too large.
    """
    if not _NAME.fullmatch(cluster.name):
        raise UsageError(f"`{cluster.name}` cannot be the name of a Job", hint="--name prewarm: a-z, 0-9 and dashes")
    groups = _groups(spec, cluster)
    files = {
        _file(group, index): dump([entry]) for group, entries in groups.items() for index, entry in enumerate(entries)
    }
    if sum(len(name) + len(text.encode()) for name, text in files.items()) > _CONFIG_BYTES:
        raise UsageError("the spec is larger than a ConfigMap may be", hint="--entry NAME picks some of its entries")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(cluster, cluster.name), "data": files}
    jobs = [_job(group, entries, cluster) for group, entries in groups.items()]
    return "---\n".join(documents.as_yaml(document) for document in (config, *jobs))


def _groups(spec: Spec, cluster: Cluster) -> dict[str, list[Entry]]:
    """The entries by what nodes they need, under a name for that."""
    found: dict[tuple[str | None, int], list[Entry]] = {}
    for entry in spec.entries:
        found.setdefault((_product(entry, cluster), entry.gpus), []).append(entry)
    named: dict[str, list[Entry]] = {}
    for (product, gpus), entries in found.items():
        name = _group(product, gpus)
        free = (each for each in chain([name], (f"{name}-{at}" for at in count(2))) if each not in named)
        named[next(free)] = entries
    return named


def _group(product: str | None, gpus: int) -> str:
    if not gpus:
        return "cpu"
    plain = re.sub(r"[^a-z0-9]+", "-", (product or "gpu").lower()).removeprefix("nvidia-")
    return f"{plain[:18].strip('-')}-{gpus}"


def _product(entry: Entry, cluster: Cluster) -> str | None:
    """The label of the nodes that an entry needs; None for any."""
    if entry.gpu is None:
        return None
    told = cluster.products.get(entry.gpu)
    if told is None and not _DEVICE_NAME.fullmatch(entry.gpu):
        raise UsageError(
            f"entry `{entry.name}` needs the GPU `{entry.gpu}`, and nodes are labelled with whole names",
            hint=f"--gpu-product {entry.gpu}=NVIDIA-{entry.gpu.replace(' ', '-')}: kubectl get nodes -L {PRODUCT}",
        )
    label = re.sub(r"\s+", "-", entry.gpu) if told is None else told
    if not _LABEL.fullmatch(label):
        raise UsageError(f"`{label}` cannot be the label of a node", hint=f"kubectl get nodes -L {PRODUCT}")
    return label


def _file(group: str, index: int) -> str:
    return f"{group}-{index}.yaml"


def _metadata(cluster: Cluster, name: str) -> dict[str, object]:
    place = {} if cluster.namespace is None else {"namespace": cluster.namespace}
    return {"name": name, **place, "labels": dict(_LABELS)}


def _job(group: str, entries: Sequence[Entry], cluster: Cluster) -> dict[str, object]:
    limit = max(entry.limit for entry in entries)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(cluster, f"{cluster.name}-{group}"),
        "spec": {
            "completionMode": "Indexed",
            "completions": len(entries),
            "parallelism": min(cluster.parallel, len(entries)),
            "backoffLimitPerIndex": _RETRIES,
            "maxFailedIndexes": len(entries),
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailIndex",
                        "onExitCodes": {"containerName": "prewarm", "operator": "In", "values": [1, 2, 3]},
                    },
                ]
            },
            "template": {
                "metadata": {"labels": dict(_LABELS)},
                "spec": _pod(group, entries[0], cluster) | {"activeDeadlineSeconds": round(limit) + _GRACE_SECONDS},
            },
        },
    }


def _pod(group: str, entry: Entry, cluster: Cluster) -> dict[str, object]:
    pod: dict[str, object] = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": cluster.service_account is not None,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(group, entry, cluster)],
        "volumes": [
            {"name": "spec", "configMap": {"name": cluster.name}},
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if cluster.service_account is not None:
        pod["serviceAccountName"] = cluster.service_account
    if entry.gpus:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    product = _product(entry, cluster)
    if product is not None:
        pod["nodeSelector"] = {PRODUCT: product}
    return pod


def _container(group: str, entry: Entry, cluster: Cluster) -> dict[str, object]:
    places = {"HOME": "/cache/home", "CACHEMGR_HOME": "/cache/cachemgr", "CACHEMGR_STORE": "/cache/store"}
    environ = {**places, **cluster.environ}
    container: dict[str, object] = {
        "name": "prewarm",
        "image": cluster.image,
        "command": ["cachemgr", "prewarm"],
        # Kubernetes puts the index of the pod into the name.
        "args": ["--spec", f"/spec/{group}-$(JOB_COMPLETION_INDEX).yaml", *cluster.words],
        "env": [{"name": name, "value": value} for name, value in environ.items()],
        "resources": {
            "requests": {"cpu": cluster.cpu, "memory": cluster.memory},
            "limits": {"memory": cluster.memory, **({GPU: entry.gpus} if entry.gpus else {})},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "spec", "mountPath": "/spec", "readOnly": True},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "cache", "mountPath": "/tmp", "subPath": "tmp"},  # noqa: S108 - in the pod
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - in the pod
        ],
    }
    if cluster.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    return container
