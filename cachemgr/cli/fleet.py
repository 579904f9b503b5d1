"""Options of `cachemgr prewarm` that have a spec done elsewhere: on a Ray cluster, or by Jobs of Kubernetes."""

from collections.abc import Mapping

import click

from cachemgr.cli import output
from cachemgr.cli.session import WallClock, talk_apart
from cachemgr.errors import UsageError
from cachemgr.factors.program import shown
from cachemgr.prewarm import kubernetes, on_ray
from cachemgr.prewarm.entries import Record
from cachemgr.prewarm.passes import MAX_PASSES, Options, Result
from cachemgr.settings import Settings
from cachemgr.spec import Spec

Given = Mapping[str, str | int | tuple[str, ...] | None]
"""The values of the options of `elsewhere`, by name."""


def elsewhere(function: output.F) -> output.F:
    """Where a spec is done, and how."""
    for option in (
        click.option("--gpu-product", "products", multiple=True, metavar="GPU=LABEL", help="of a Job's nodes"),
        click.option("--memory", metavar="SIZE", help="of a Job's pods, such as 64Gi"),
        click.option("--cpu", metavar="COUNT", help="of a Job's pods"),
        click.option("--secret", metavar="NAME", help="a Secret whose keys are variables of a Job's pods"),
        click.option("--service-account", metavar="NAME", help="of a Job's pods: it may write the mirror"),
        click.option("--namespace", metavar="NAME", help="of the Jobs"),
        click.option("--name", metavar="NAME", help="of the Jobs"),
        click.option("--image", metavar="IMAGE", help="of a Job's pods, with the engine and cachemgr in it"),
        click.option("--parallel", type=click.IntRange(min=1), help="of each kind of GPU at a time  [default: 4]"),
        click.option("--emit", type=click.Choice(["kubernetes"]), help="print Jobs that do it in a cluster, and stop"),
        click.option("--on", metavar="ray|ray://HOST:PORT", help="a task for each entry on a Ray cluster"),
    ):
        function = option(function)
    return function


def is_told(
    spec: Spec, settings: Settings, given: Given, options: Options, *, dry_run: bool, as_json: bool, here: bool
) -> bool:
    """Whether nothing is left to do, because Jobs were asked for, or what a cluster would do. `here`: something was
    asked for as well that needs what is compiled on this machine.

    Raises:
        UsageError: as `emit`; two things were asked for that exclude each other.
    """
    if given["emit"] is not None and given["on"] is not None:
        raise UsageError("--on and --emit are two ways", hint="one of them")
    if here and (given["on"] is not None or given["emit"] is not None):
        raise UsageError(
            "a seed is baked and verified on a machine of its kind, not where its spec is sent from",
            hint="without --bake and --verify; afterwards `prewarm --target … --bake` takes it from the mirror",
        )
    if given["emit"] is not None:
        emit(spec, settings, given, options)
    elif given["on"] is not None and dry_run:
        show(spec, as_json=as_json)
    else:
        return False
    return True


def emit(spec: Spec, settings: Settings, given: Given, options: Options) -> None:
    """Print the Jobs.

    Raises:
        UsageError: something is missing that pods need.
    """
    if given["image"] is None:
        raise UsageError("pods need an image", hint="--image IMAGE, with the engine and cachemgr in it")
    names = ("image", "name", "namespace", "service_account", "secret", "parallel", "cpu", "memory")
    told = {name: given[name] for name in names if given[name] is not None}
    products = dict(_pair(text) for text in _texts(given["products"]))
    cluster = kubernetes.Cluster(
        environ=_environ(settings),
        words=_words(settings, options),
        products=products,
        **told,  # type: ignore[arg-type]
    )
    output.lines([kubernetes.manifests(spec, cluster).rstrip("\n")])


def show(spec: Spec, *, as_json: bool) -> None:
    """What a cluster would be asked to do. What its nodes have already, only they can tell."""
    if as_json:
        output.document(plan=spec.entries, dry_run=True)
        return
    rows = [
        (entry.name, entry.wanted_gpus if entry.gpus else "", " ".join(shown(entry.command))) for entry in spec.entries
    ]
    output.table(("ENTRY", "NEEDS", "COMMAND"), rows, flexible="COMMAND")


def on_cluster(
    spec: Spec, settings: Settings, record: Record | None, given: Given, options: Options
) -> tuple[Result, ...]:
    """Have the spec done by a Ray cluster, and tell of each entry as it is done.

    Raises:
        UsageError: there is no spec, only a command; or as `cachemgr.prewarm.on_ray.prewarm_on_ray`.
        StoreError: as that.
    """
    if record is None:
        raise UsageError("--on takes a spec", hint="--spec FILE, also for one entry")
    parallel = given["parallel"]
    cluster = on_ray.Cluster(
        str(given["on"]), _environ(settings), _words(settings, options), parallel if isinstance(parallel, int) else 4
    )

    def told(result: Result, node: str) -> None:
        where = f" on {node}" if node else ""
        output.note(f"{result.name}: {result.state}{where}" + (f" · {result.reason}" if result.reason else ""))

    with talk_apart():  # Ray prints what its workers say
        return on_ray.prewarm_on_ray(spec, cluster, record, now=WallClock().text, told=told)


def _words(settings: Settings, options: Options) -> tuple[str, ...]:
    """Options of `cachemgr prewarm` on a machine elsewhere."""
    asked: dict[tuple[str, ...], bool] = {
        ("--if-missing",): options.if_missing,
        ("--publish", "mirror"): True,
        ("--real-weights",): options.real_weights,
        ("--max-passes", str(options.max_passes)): options.max_passes != MAX_PASSES,
        **{("--ignore-arg", name): True for name in settings.ignore_arg},
    }
    return tuple(word for words, is_asked in asked.items() if is_asked for word in words)


def _environ(settings: Settings) -> dict[str, str]:
    """What other machines are told.

    Raises:
        UsageError: they would have no mirror, and what they compile would be lost with them.
    """
    if settings.mirror is None:
        raise UsageError("machines elsewhere need a mirror for what they compile", hint="--mirror s3://BUCKET/PREFIX")
    return settings.of_fleet()


def _texts(value: str | int | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else ()


def _pair(text: str) -> tuple[str, str]:
    gpu, equals, label = text.partition("=")
    if not equals or not gpu or not label:
        raise UsageError(f"`{text}` gives no GPU a label", hint="--gpu-product H200=NVIDIA-H200")
    return gpu, label
