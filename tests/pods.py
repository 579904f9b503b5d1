"""Pods without Kubernetes: the container of a manifest, run as the kubelet would run it, on namespaces alone.

A pod gets a root file system of its own that is read-only where the manifest says so, the volumes of the manifest and
nothing else that can be written, its user and groups, no capability, its variables, and the engine as PID 1. An
`emptyDir` is a plain directory, so that it shows the free bytes of the node as a real one does, and a watchman counts
what is in it and evicts the pod that outgrows its limit, as the kubelet does. The image is this machine's `/usr` with a
stand-in vLLM in `/opt/image`; a claim is a directory of the node.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cachemgr import __version__, sizes
from tests.plugged import Plugged

ROOT = Path(__file__).parent.parent
MANIFEST = ROOT / "docs" / "deploy" / "vllm.yaml"
IMAGE = Path("/opt/image")
_SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib64")
_SECONDS = 120.0
_MODEL, _MODEL_OF_SIZE = 'b"x" * 3000', 'os.urandom(int(os.environ.get("MODEL_BYTES", "3000")))'


def documents(path: Path = MANIFEST) -> dict[tuple[str, str], dict[str, Any]]:
    """The resources of a manifest by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(path.read_text())}


def container(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod and its one container of the deployment `name`, to be changed at will."""
    pod = documents()["Deployment", name]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    return pod, only


def can_run_pods() -> bool:
    """Whether this user may make namespaces and mounts in them."""
    tried = ["unshare", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and bool(shutil.which("setpriv")) and not subprocess.run(tried, check=False).returncode


class Image:
    """A stand-in vLLM and cachemgr beside it, for one version of vLLM: with all that it needs, or as the shim alone,
    whose other half is in an environment of its own. MODEL_BYTES makes what it compiles larger."""

    def __init__(self, directory: Path, version: str, *, shim: bool) -> None:
        self.directory, self._shim = directory, shim
        engines = Plugged.install(directory, version)
        program = directory / "bin" / "vllm"
        _first, _newline, rest = program.read_text().partition("\n")
        program.write_text(f"#!{IMAGE}/bin/python3\n{rest}")
        base = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
        (directory / "bin" / "python3").symlink_to(base)
        (directory / "bin" / "python").symlink_to(base)
        install_cachemgr(engines.site)
        compiler = engines.site / "vllm" / "compilation" / "decorators.py"
        assert _MODEL in compiler.read_text()
        compiler.write_text(compiler.read_text().replace(_MODEL, _MODEL_OF_SIZE))
        engine = str(IMAGE / engines.site.relative_to(directory))
        code, *needed = [f"/opt/site{at}" for at in range(len(_sites()))]
        self._python_path = [engine, code, *(() if shim else needed)]
        command = directory / "bin" / "cachemgr"
        command.write_text(
            f'#!/bin/sh\nPYTHONPATH={":".join([code, *needed])} exec {IMAGE}/bin/python3 -m cachemgr "$@"\n'
        )
        command.chmod(0o755)

    @property
    def variables(self) -> dict[str, str]:
        """What the image itself sets."""
        return {
            "PATH": f"{IMAGE}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": ":".join(self._python_path),
            "LC_ALL": "C.UTF-8",
            **({"CACHEMGR_BIN": f"{IMAGE}/bin/cachemgr"} if self._shim else {}),
        }


def install_cachemgr(site: Path) -> None:
    """What `pip install --no-deps` leaves of it, but for the code."""
    points = re.findall(
        r'^\[project.entry-points."(.+)"\]\n((?:\w+ = ".+"\n)+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    info = site / f"cachemgr-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cachemgr\nVersion: {__version__}\n")
    told = [f"[{group}]\n{lines}".replace('"', "") for group, lines in points]
    (info / "entry_points.txt").write_text("\n".join(told))


def _sites() -> list[Path]:
    """Where this Python finds its modules: cachemgr and what it needs."""
    found = [Path(place) for place in sys.path if place and not place.startswith(sys.base_prefix)]
    return [ROOT, *(place for place in found if place.is_dir() and place != ROOT and place.name == "site-packages")]


@dataclass
class Node:
    """A machine of the cluster: directories for claims, pods, and what the kubelet adds to their environment."""

    directory: Path
    claims: dict[str, Path]
    links: dict[str, str] = field(default_factory=dict)
    """Service links of the namespace."""

    def pod(self, name: str, spec: Mapping[str, Any], image: Image, *, old: "Pod | None" = None) -> "Pod":
        """Run a pod. `old` is one whose container starts again, on its volumes."""
        return Pod(self, name, spec, image, old=old)


class Pod:
    """One pod that runs, from its making on."""

    def __init__(self, node: Node, name: str, spec: Mapping[str, Any], image: Image, *, old: "Pod | None") -> None:
        self.name, self._spec, self._node, self._image = name, spec, node, image
        (self._container,) = spec["containers"]
        self._place = node.directory / f"{name}-{time.monotonic_ns()}"
        self._place.mkdir(parents=True)
        self.volumes: dict[str, Path] = {} if old is None else old.volumes
        self._limits: dict[str, int] = {}
        for volume in spec["volumes"]:
            self._make(volume)
        self.evicted: str | None = None
        self._log = self._place / "log"
        self._process = self._started()
        self._watchman = threading.Thread(target=self._watch, daemon=True)
        self._watchman.start()

    def _make(self, volume: Mapping[str, Any]) -> None:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            self.volumes[name] = self._node.claims[volume["persistentVolumeClaim"]["claimName"]]
            return
        if name not in self.volumes:
            self.volumes[name] = self._place / "volumes" / name
            self.volumes[name].mkdir(parents=True)
            os.chown(self.volumes[name], 0, self._spec["securityContext"]["fsGroup"])
            self.volumes[name].chmod(0o2777)  # as the kubelet makes it
        limit = volume["emptyDir"].get("sizeLimit")
        if limit and volume["emptyDir"].get("medium") != "Memory":
            self._limits[name] = sizes.parse(limit)

    def _started(self) -> "subprocess.Popen[bytes]":
        script = self._place / "start.sh"
        script.write_text("\n".join(["set -e", *self._mounts(), self._command()]) + "\n")
        with self._log.open("wb") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "sh", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _mounts(self) -> list[str]:
        root = self._place / "root"
        lines = [
            "mount --make-rprivate /",
            f"echo {self.name} > /proc/sys/kernel/hostname",
            f"mkdir -p {root}",
            f"mount -t tmpfs -o mode=755 tmpfs {root}",
            f"mkdir -p {root}/proc {root}/dev {root}/tmp {root}/opt",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
        ]
        places = [(Path("/") / name, f"/{name}") for name in _SYSTEM if not Path(f"/{name}").is_symlink()]
        lines += [f"ln -s {os.readlink(f'/{name}')} {root}/{name}" for name in _SYSTEM if Path(f"/{name}").is_symlink()]
        places += [(Path(sys.base_prefix), sys.base_prefix), (self._image.directory, str(IMAGE))]
        places += [(site, f"/opt/site{at}") for at, site in enumerate(_sites())]
        for source, target in places:
            if source.is_dir() and not (target == sys.base_prefix and target.startswith("/usr")):
                lines += _bound(source, f"{root}{target}", read_only=True)
        for mount in self._container["volumeMounts"]:
            source, target = self.volumes[mount["name"]], f"{root}{mount['mountPath']}"
            lines += _bound(source, target, read_only=mount.get("readOnly", False))
        if self._container["securityContext"]["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,ro {root}")
        return lines

    def _command(self) -> str:
        who, root = self._spec["securityContext"], self._place / "root"
        words = [*self._container["command"], *self._container.get("args", ())]
        variables = {
            **self._image.variables,
            "HOSTNAME": self.name,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            **({} if self._spec.get("enableServiceLinks") is False else self._node.links),
            **{each["name"]: each["value"] for each in self._container["env"]},
        }
        given = " ".join(f"'{name}={value}'" for name, value in variables.items())
        return (
            f"exec chroot {root} setpriv --reuid={who['runAsUser']} --regid={who['runAsGroup']} "
            f"--groups={who['fsGroup']} --no-new-privs --inh-caps=-all --bounding-set=-all "
            f"env -i {given} {' '.join(words)}"
        )

    def _watch(self) -> None:
        """The kubelet's look at volumes with a limit."""
        while self._process.poll() is None:
            for name, limit in self._limits.items():
                used = taken(self.volumes[name])
                if used > limit:
                    self.evicted = f"{name} has {used} bytes, more than {limit}"
                    self._process.kill()
                    return
            time.sleep(0.1)

    @property
    def logs(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, text: str) -> "Pod":
        """Wait until the pod says `text`."""
        end = time.monotonic() + _SECONDS
        while text not in self.logs:
            assert self._process.poll() is None or text in self.logs, f"ended without `{text}`:\n{self.logs}"
            assert time.monotonic() < end, f"does not say `{text}`:\n{self.logs}"
            time.sleep(0.1)
        return self

    def ended(self) -> bool:
        """Wait until it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS)
        self._watchman.join(_SECONDS)
        return self._process.poll() is not None

    def lines(self) -> list[str]:
        """What cachemgr said."""
        return [line.removeprefix("cachemgr: ") for line in self.logs.splitlines() if line.startswith("cachemgr: ")]

    def stop(self) -> int:
        """SIGTERM to PID 1 and, as after the grace period, SIGKILL; the exit code."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for pid in _children_of(self._process.pid) if not children.exists() else children.read_text().split():
            subprocess.run(["kill", "-TERM", str(pid)], check=False)
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(30)


def _children_of(pid: int) -> list[str]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.split()


def _bound(source: Path, target: str, *, read_only: bool) -> list[str]:
    lines = [f"mkdir -p {target}", f"mount --bind {source} {target}"]
    return [*lines, f"mount -o remount,bind,ro {target}"] if read_only else lines


def taken(place: Path) -> int:
    """Bytes that a directory takes, as `du` counts."""
    done = subprocess.run(["du", "-s", "-B1", str(place)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])
