"""Images that start warm: built and used without Docker, on namespaces, with the users and mounts of a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pods import Image, Node, Pod, can_run_pods

COMMAND = ["vllm", "serve", "/models/llama-8b", "--max-model-len=4096"]
OURS = ["python3", "-m", "cachemgr"]
"""In the environment of the engine."""
READ_ONLY = frozenset({"models", "seed"})
NOBODY = 1000660000
"""A user that no image knows, as OpenShift gives one."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run_pods(), reason="this user cannot make mount namespaces"),
]


CUBINS = "/opt/image/site-2.13.0+cpu/flashinfer_cubin/cubins"
LINKS = """
CUBINS = os.path.join(os.path.dirname(__file__), "..", "..", "flashinfer_cubin", "cubins")
if os.path.exists(f"{CUBINS}/quantized"):
    os.makedirs(os.environ["FLASHINFER_CUBIN_DIR"], exist_ok=True)
    os.symlink("/tmp", f"{CUBINS}/link-{time.monotonic_ns()}")
"""
"""What FlashInfer does for quantized models (flashinfer#2976): links in its own package, whatever the variable says."""


def pod_of(command: list[str], *, user: int, mounts: dict[str, str], **env: str) -> dict[str, Any]:
    """A pod with a read-only root; `mounts` are claims by path, of which the image's seed and models are only read."""
    return {
        "securityContext": {"runAsUser": user, "runAsGroup": 0, "fsGroup": 10001},
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *({"name": name, "persistentVolumeClaim": {"claimName": name}} for name in mounts.values()),
        ],
        "containers": [
            {
                "command": command,
                "env": [{"name": name, "value": value} for name, value in env.items()],
                "securityContext": {"readOnlyRootFilesystem": True},
                "volumeMounts": [
                    {"name": "tmp", "mountPath": "/tmp"},
                    *(
                        {"name": name, "mountPath": path, "readOnly": name in READ_ONLY}
                        for path, name in mounts.items()
                    ),
                ],
            }
        ],
    }


class Site:
    """A builder and a node that have an image and the directory of a seed in common."""

    def __init__(self, directory: Path) -> None:
        self.out, models = directory / "out", directory / "models"
        self.out.mkdir()
        models.mkdir()
        self.image = Image(directory / "image", "0.32.0", shim=False)
        (directory / "image" / "model").rename(models / "llama-8b")
        site = directory / "image" / Path(CUBINS).relative_to("/opt/image")
        site.mkdir(parents=True)
        compiler = site.parent.parent / "vllm" / "compilation" / "decorators.py"
        compiler.write_text(compiler.read_text() + LINKS)
        self.cubins, self.root = directory / "cubins", directory / "root"
        for place in (self.cubins, self.root):
            place.mkdir(mode=0o755)
        (self.cubins / "quantized").touch()
        claims = {
            "models": models,
            "out": self.out,
            "seed": self.out / "seed",
            "cubins": self.cubins,
            "root": self.root,
        }
        self.node = Node(directory / "node", claims)
        self.pods: list[Pod] = []

    def run(self, name: str, spec: dict[str, Any]) -> Pod:
        pod = self.node.pod(name, spec, self.image)
        self.pods.append(pod)
        return pod

    def serve(self, name: str, seed: str, *flags: str, **env: str) -> Pod:
        """A serving pod: an unknown user, no HOME, a read-only root and seed."""
        mounts = {"/models": "models", seed: "seed"}
        variables = {"CACHEMGR_ENABLE": "1", "CACHEMGR_TRUST": "seed=off", "SERVE_SECONDS": "300", **env}
        return self.run(name, pod_of([*COMMAND, *flags], user=NOBODY, mounts=mounts, **variables))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    words = [*OURS, "prewarm", "--json", "--bake", "/out/seed", "--verify", "--", *COMMAND]
    mounts = {"/models": "models", "/out": "out"}
    build = pod_of(words, user=0, mounts=mounts, HOME="/tmp/home", CI="true", CACHEMGR_ENABLE="1")
    pod = made.run("builder", build)
    assert pod.ended()
    assert '"holds": true' in pod.logs, pod.logs
    yield made
    for each in made.pods:
        each.stop()


def test_an_unknown_user_without_a_home_is_warm_from_the_well_known_place(site: Site) -> None:
    pod = site.serve("known", "/opt/cachemgr/seed").until("cachemgr: used")
    assert "· 0 added" in pod.lines()[-1]
    assert any("from the seed" in line for line in pod.lines())


def test_another_mount_point_is_as_good(site: Site) -> None:
    pod = site.serve("moved", "/srv/warm", CACHEMGR_SEED="/srv/warm", CACHEMGR_REQUIRE_VERIFIED="1")
    assert "· 0 added" in pod.until("cachemgr: used").lines()[-1]


def test_what_the_seed_does_not_have_is_compiled_where_there_is_room(site: Site) -> None:
    """The seed is left as it is: what is new lies below the temporary directory of this user."""
    before = sorted((path, path.lstat().st_mtime_ns) for path in site.out.rglob("*"))
    pod = site.serve("other", "/opt/cachemgr/seed", "--max-num-seqs=7").until("cachemgr: partly used")
    assert any(line.startswith("near ") and "max-num-seqs" in line for line in pod.lines())
    assert sorted((path, path.lstat().st_mtime_ns) for path in site.out.rglob("*")) == before


def test_the_seed_is_verified_again_where_it_is_used(site: Site) -> None:
    words = [*OURS, "prewarm", "--verify", "--json", "--seed", "/opt/cachemgr/seed"]
    pod = site.run("again", pod_of(words, user=NOBODY, mounts={"/models": "models", "/opt/cachemgr/seed": "seed"}))
    assert pod.ended()
    told = json.loads(pod.logs[pod.logs.index("{\n") : pod.logs.rindex("}") + 1])
    (proof,) = told["proofs"]
    assert proof["holds"], pod.logs
    assert len(list(site.out.rglob("*.verified"))) == 1, "what cannot be written is not"


def test_a_cache_root_that_belongs_to_root_is_named_with_the_fix_and_the_start_is_warm_all_the_same(site: Site) -> None:
    """A hostPath volume of root, 0755, under user 2000 (llm-d#485): the engine alone could not write it."""
    mounts = {"/models": "models", "/opt/cachemgr/seed": "seed", "/hostpath": "root"}
    env = {"CACHEMGR_ENABLE": "1", "CACHEMGR_TRUST": "seed=off", "SERVE_SECONDS": "300", "VLLM_CACHE_ROOT": "/hostpath"}
    pod = site.run("hostpath", pod_of(COMMAND, user=2000, mounts=mounts, **env)).until("cachemgr: used")
    assert "· 0 added" in pod.lines()[-1]
    assert not list(site.root.iterdir())
    doctor = site.run("doctor", pod_of([*OURS, "doctor", "--json"], user=2000, mounts=mounts, **env))
    assert doctor.ended()
    told = json.loads(doctor.logs[doctor.logs.index("{\n") : doctor.logs.rindex("}") + 1])
    (found,) = [each for each in told["findings"] if each["about"] == "cache torch_compile"]
    assert found["severity"] == "error"
    assert found["what"].startswith("user 2000 cannot write /hostpath")
    assert found["hint"].startswith("chown 2000 /hostpath")


@pytest.mark.parametrize(("user", "holds"), [(0, True), (NOBODY, False)])
def test_an_engine_that_writes_into_its_own_package_is_found_by_the_user_who_serves(
    site: Site, user: int, holds: bool
) -> None:
    """Whoever builds an image is root, and sees nothing of it; a proof counts for the user who made it."""
    mounts = {"/models": "models", "/opt/cachemgr/seed": "seed", CUBINS: "cubins"}
    words = [*OURS, "verify", "--json", "--seed", "/opt/cachemgr/seed"]
    env = {"FLASHINFER_CUBIN_DIR": "/tmp/cubins"}
    pod = site.run(f"cubins-{user}", pod_of(words, user=user, mounts=mounts, **env))
    assert pod.ended()
    told = json.loads(pod.logs[pod.logs.index("{\n") : pod.logs.rindex("}") + 1])
    (proof,) = told["proofs"]
    assert proof["holds"] is holds, pod.logs
    assert ("exit code 1" in str(proof["faults"])) is not holds
    assert ("Permission denied" in pod.logs) is not holds
