"""Kubernetes with the plugin alone: the manifest of the documentation is valid, and its pods run and are warm."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import kubernetes_validate
import pytest

from tests.pods import MANIFEST, ROOT, Image, Node, Pod, can_run_pods, container, documents, taken

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
LINKS = {
    "VLLM_API_SERVICE_HOST": "10.96.0.7",
    "VLLM_API_SERVICE_PORT": "80",
    "VLLM_API_PORT_80_TCP": "tcp://10.96.0.7:80",
    "TORCH_SERVE_SERVICE_HOST": "10.96.0.8",
}
"""What the kubelet sets where a namespace has services with such names."""


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_the_manifest_is_valid(version: str) -> None:
    assert len(documents()) == 5
    for document in documents().values():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_manifest_with_a_misspelt_field_is_not() -> None:
    deployment = documents()["Deployment", "llama-8b"]
    deployment["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


def test_what_the_page_quotes_is_in_the_manifest() -> None:
    manifest = [_bare(line) for line in MANIFEST.read_text().splitlines()]
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    quoted = [_bare(line) for block in blocks for line in block.splitlines()]
    assert len(quoted) > 10
    assert [line for line in quoted if line not in manifest] == []


def _bare(line: str) -> str:
    return line.split("#", maxsplit=1)[0].strip()


def test_both_deployments_differ_in_nothing_but_who_publishes() -> None:
    first, others = container("llama-8b-first")[0], container("llama-8b")[0]
    assert first != others
    for pod in (first, others):
        (only,) = pod["containers"]
        only["env"] = [each for each in only["env"] if each["name"] != "CACHEMGR_PUBLISH"]
        for mount in only["volumeMounts"]:
            if mount["name"] == "store":
                mount.pop("readOnly", None)
    assert first == others


class Cluster:
    """One node with a claim for the store and one for models, and images."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store, models = directory / "store", directory / "models"
        self.store.mkdir()
        os.chown(self.store, 0, 10001)
        self.store.chmod(0o2775)
        models.mkdir()
        self.images = {
            "0.31.0": Image(directory / "image-0.31.0", "0.31.0", shim=False),
            "0.32.0": Image(directory / "image-0.32.0", "0.32.0", shim=True),
        }
        (directory / "image-0.32.0" / "model").rename(models / "llama-8b")
        self.node = Node(directory / "node", {"cachemgr-store": self.store, "models": models}, LINKS)
        self.pods: list[Pod] = []

    def run(
        self,
        deployment: str,
        *,
        version: str = "0.32.0",
        env: Mapping[str, str | None] | None = None,
        limit: str | None = None,
        links: bool = False,
        command: list[str] | None = None,
        old: Pod | None = None,
    ) -> Pod:
        """A pod of the manifest; `env` changes variables (None takes one away), `limit` the size of its cache."""
        spec, only = container(deployment)
        given = {each["name"]: each["value"] for each in only["env"]} | {"SERVE_SECONDS": "300"} | dict(env or {})
        only["env"] = [{"name": name, "value": value} for name, value in given.items() if value is not None]
        if links:
            del spec["enableServiceLinks"]
        if limit is not None:
            (cache,) = [volume for volume in spec["volumes"] if volume["name"] == "cache"]
            cache["emptyDir"]["sizeLimit"] = limit
        if command is not None:
            only["command"], only["args"] = command, []
        pod = self.node.pod(f"{deployment}-{len(self.pods)}", spec, self.images[version], old=old)
        self.pods.append(pod)
        return pod

    def first_pods(self) -> None:
        """Pods that compile and publish, all at once: each has to be at rest for a while. Two of them keep their store
        in a volume that has room for what the engine compiles, and not for a copy of it."""
        self.firsts = [self.run("llama-8b-first", version=version) for version in self.images]
        env = {"CACHEMGR_STORE": None, "MODEL_BYTES": "2000000"}
        self.careful = self.run("llama-8b-first", limit="3Mi", env={**env, "CACHEMGR_BUDGET": "2500k"})
        self.careless = self.run("llama-8b-first", limit="3Mi", env={**env, "CACHEMGR_BUDGET": "0"})

    def listing(self) -> list[tuple[str, int]]:
        """Everything in the store."""
        return sorted((str(path), path.lstat().st_mtime_ns) for path in self.store.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    made.first_pods()
    yield made
    for pod in made.pods:
        pod.stop()


@pytest.mark.slow
@pytest.mark.skipif(not can_run_pods(), reason="this user cannot make mount namespaces")
class TestPods:
    def test_a_pod_can_write_its_volumes_and_nothing_else(self, cluster: Cluster) -> None:
        """The stage itself, or the other tests would prove nothing."""
        tries = "for place in / /usr /etc /opt/image /opt/site0 /models /store /cache /tmp /dev/shm; do"
        script = f"{tries} if touch $place/probe 2>/dev/null; then echo wrote $place; fi; done; id -u; echo pid $$"
        pod = cluster.run("llama-8b", command=["sh", "-c", f"'{script}'"]).until("pid 1")
        assert [line for line in pod.logs.splitlines() if line.startswith("wrote")] == [
            "wrote /cache",
            "wrote /tmp",
            "wrote /dev/shm",
        ]
        assert "10001" in pod.logs.splitlines()

    def test_the_doctor_is_content_with_a_pod_of_the_manifest(self, cluster: Cluster) -> None:
        pod = cluster.run("llama-8b", command=["cachemgr", "doctor", "--json"]).until('"schema"')
        found = json.loads(pod.logs[pod.logs.index("{") : pod.logs.rindex("}") + 1])
        assert found["healthy"] is True
        told = {each["about"]: (each["severity"], each["what"]) for each in found["findings"]}
        assert told["user"][0] == "note"
        assert told["root"][0] == "note"
        assert told["plugin"][0] == "ok"
        assert not [each for each in found["findings"] if each["severity"] == "warning"]

    def test_pods_of_two_versions_are_warm_from_what_the_first_of_each_published(self, cluster: Cluster) -> None:
        """A rolling upgrade: both versions live at once on one store."""
        firsts = cluster.firsts
        for first in firsts:
            assert first.until("captured").lines()[0].startswith("no artifact yet")
        assert len(list((cluster.store / "cachemgr" / "artifacts").iterdir())) == 2
        firsts[0].stop()
        published = cluster.listing()
        others = [
            cluster.run("llama-8b", version="0.31.0"),
            cluster.run("llama-8b", links=True, env={"HOME": "/"}),
            cluster.run("llama-8b-first", version="0.31.0", old=firsts[0]),
        ]
        for pod in others:
            pod.until("cachemgr: used")
            assert "· 0 added" in pod.lines()[-1]
        assert "restored" in others[0].lines()[0]
        assert "in place" in others[2].lines()[0], "a container that starts again finds its volume as it was"
        assert all("failed" not in pod.logs for pod in (*firsts, *others))
        new = {path for path, _time in cluster.listing()} - {path for path, _time in published}
        assert {Path(path).relative_to(cluster.store / "cachemgr").parts[0] for path in new} <= {
            "launches",
            "leases",
        }, "no artifact"
        for pod in (*firsts, *others):
            assert pod.evicted is None
            cache = pod.volumes["cache"]
            assert {path.name for path in cache.iterdir()} <= {"cachemgr", "vllm", "home"}
            assert (cache / "cachemgr").stat().st_mode & 0o777 == 0o700
            assert {path.lstat().st_uid for path in cache.rglob("*")} == {10001}

    def test_a_small_volume_is_respected_and_the_engine_starts(self, cluster: Cluster) -> None:
        careful, careless = cluster.careful, cluster.careless
        careful.until("not captured: the budget of 2.5 MB leaves")
        assert careful.evicted is None
        assert taken(careful.volumes["cache"]) < 3 << 20
        assert careless.ended()
        assert careless.evicted is not None, "without a budget the same pod is evicted"


def test_every_command_of_the_page_that_is_ours_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    ours = [
        line for block in blocks for line in re.findall(r"^\$ kubectl exec \S+ -- (cachemgr .+)$", block, re.MULTILINE)
    ]
    assert len(ours) > 2
    for line in ours:
        environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        words = [sys.executable, "-m", *line.split()]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
