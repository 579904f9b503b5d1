"""Checks of the plugin: whether it is installed where the engine runs, enabled, and finds its other half."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from cachemgr import __version__, executables
from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok, warning
from cachemgr.doctor.variables import PLUGIN
from cachemgr.factors import packages, python_of

_SECONDS = 10.0


def enabled(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """It does something only where it is installed and enabled, and is wanted only where there is an engine."""
    where = _installed(patient)
    settings = opened.settings
    if settings.enable:
        origin = settings.origins["enable"]
        if where is None:
            hint = "PYTHON -m pip install --no-deps cachemgr, with the engine's Python"
            yield error("plugin", f"enabled by {origin}, and not installed beside the engine", hint)
        else:
            yield ok("plugin", f"enabled by {origin}, installed in {where}")
    elif where is not None:
        hint = "CACHEMGR_ENABLE=1, or `enable = true` in /etc/cachemgr.toml; `cachemgr run` works without"
        yield note("plugin", f"installed in {where} and not enabled", hint)
    else:
        yield note("plugin", "not installed; `cachemgr run -- CMD` works without")


def elsewhere(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """Not every executor for Ray hands our variables on to workers on other machines (0.26-0.33 ray/ray_env.py)."""
    settings = opened.settings
    ray = "RAY_ADDRESS" in patient.environ or "ray" in {word.rpartition("=")[2] for word in patient.argv}
    if ray and settings.enable and settings.origins["enable"] == "CACHEMGR_ENABLE":
        said = "CACHEMGR_ENABLE may not reach workers of Ray on other machines"
        yield note("Ray", said, "write `enable = true` into /etc/cachemgr.toml of the image")


def _installed(patient: Patient) -> str | None:
    """Where the plugin lies beside the engine: of the command line, else of the `vllm` on PATH, else beside us."""
    argv = patient.argv or (("vllm",) if executables.find("vllm", patient.environ, patient.cwd) else ())
    if not argv:
        points = metadata.entry_points(group="vllm.general_plugins", name=PLUGIN)
        return str(Path(__file__).parents[2]) if points else None
    python = python_of(argv, patient.environ, patient.cwd)
    for folder in packages.folders(python.path if python else (), patient.cwd):
        described = packages.distributions(folder).get("cachemgr")
        if described is not None:
            return str(folder)
    return None


def executable(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """The cachemgr in another environment is there and is of the same version."""
    path = opened.settings.bin
    if path is None:
        return
    found = executables.resolve(str(path), patient.environ, patient.cwd)  # says by itself what is wrong
    answer = executables.ask([str(found), "--version"], patient.environ, patient.cwd, _SECONDS)
    if answer is None:
        yield error("CACHEMGR_BIN", f"{found} does not answer `--version`", f"{found} --version")
        return
    version = answer.decode(errors="replace").strip().rpartition(" ")[2]
    if version == __version__:
        yield ok("CACHEMGR_BIN", f"{found} ({version})")
    else:
        hint = f"install cachemgr {__version__} in both environments"
        yield warning("CACHEMGR_BIN", f"{found} is cachemgr {version}, and this is {__version__}", hint)


def shim(patient: Patient, opened: Opened) -> Iterator[Finding]:
    """The plugin beside the engine speaks to a cachemgr of its own version: this one, or that of CACHEMGR_BIN."""
    where = _installed(patient)
    version = None if where is None else _version_in(Path(where))
    if version is not None and version != __version__ and opened.settings.bin is None:
        hint = f"install cachemgr {__version__} beside the engine, or set CACHEMGR_BIN to one of {version}"
        yield warning("plugin", f"{version} is installed in {where}, and this is {__version__}", hint)


def _version_in(folder: Path) -> str | None:
    described = packages.distributions(folder).get("cachemgr")
    return None if described is None else packages.version(described)
