"""Verifying seeds: starts from a seed alone, in a process with a network of its own where that can be had."""

import os
import shutil
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

import click
import msgspec

from cachemgr import background, places, verified
from cachemgr.cache import open_cache
from cachemgr.child import Child, Ended
from cachemgr.cli import output, share
from cachemgr.cli.fleet import show
from cachemgr.cli.session import WallClock, new_launch, ourselves, settings_of, talk_apart
from cachemgr.cli.starts import Telling, free_port, template_of, without_sign_key
from cachemgr.errors import LaunchError, StoreError
from cachemgr.live import PROOF_PREFIX
from cachemgr.places import working_directory
from cachemgr.prewarm import isolation
from cachemgr.prewarm.passes import Machinery, Options
from cachemgr.prewarm.proof import Network, Proof, Trial
from cachemgr.prewarm.proof import prove as prove_entry
from cachemgr.prewarm.seed import is_sealed, seal, wanted_of
from cachemgr.process import children, descendants
from cachemgr.settings import Settings
from cachemgr.spec import Entry, Spec, dump, load
from cachemgr.store import Store
from cachemgr.store.local import LocalStore

_FAREWELL_SECONDS = 10.0
"""How long what was killed may take to be gone: a driver may have to give memory back."""
_COMMANDS, _ANSWER = "commands.yaml", "answer.json"
"""In the directory of those who prove."""


class _Answer(msgspec.Struct, frozen=True):
    proofs: tuple[Proof, ...]


def proven(ctx: click.Context, settings: Settings, seed: Path, spec: Spec, *, real_weights: bool) -> tuple[Proof, ...]:
    """Start each entry of a spec from a seed alone, without a network, and say what was seen. The process that starts
    them may die of one, as when memory runs out: another one goes on with those after it.

    Raises:
        LaunchError: the process died before it started anything.
        KeyboardInterrupt: somebody told us to end, and it has ended, too.
    """
    network: Network = "none" if isolation.can_unshare() else "no proxy"
    proofs: list[Proof] = []
    before = children(os.getpid())
    while len(proofs) < len(spec.entries):
        left = spec.entries[len(proofs) :]
        got, code = _some_proven(ctx, settings, seed, left, network, real_weights=real_weights)
        proofs += got
        if len(got) < len(left):
            fault = f"the process that started it ended with exit code {code}"
            _end_orphans(before)
            proofs.append(Proof(left[len(got)].name, holds=False, faults=(fault,), network=network))
    return tuple(proofs)


def _some_proven(
    ctx: click.Context,
    settings: Settings,
    seed: Path,
    entries: Sequence[Entry],
    network: Network,
    *,
    real_weights: bool,
) -> tuple[tuple[Proof, ...], int]:
    """What one process saw of these entries, as far as it came, and its exit code.

    Raises:
        LaunchError, KeyboardInterrupt: as `proven`.
    """
    base = isolation.base_of_places(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=PROOF_PREFIX, dir=base, ignore_cleanup_errors=True) as place:
        Path(place, _COMMANDS).write_text(dump(entries))
        words = ["--seed", str(seed), "--network", network, *(["--real-weights"] if real_weights else []), place]
        apart = ["unshare", "--net", "--"] if network == "none" else []
        environ = without_sign_key({**os.environ, **settings.of_flags()}, settings)
        ended = _ended([*apart, *ourselves(ctx), "prove", *words], environ)
        try:
            return msgspec.json.decode(Path(place, _ANSWER).read_bytes(), type=_Answer).proofs, ended.code
        except (OSError, msgspec.MsgspecError):
            raise LaunchError(f"verifying {seed} ended with exit code {ended.code} and no answer") from None


def _end_orphans(before: Collection[int]) -> None:
    """End what a process started and left to us: an engine would keep its GPU from the next one."""
    orphans = children(os.getpid()).difference(before)
    for pid in orphans.union(*map(descendants, orphans)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    background.wait(orphans, _FAREWELL_SECONDS)


def _ended(words: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Wait for a process that is told what we are told: it must not go on when we are told to end."""
    with talk_apart():
        ended = Child.start(words, environ, working_directory()).wait(linger=0.0)
    if ended.told:
        raise KeyboardInterrupt
    return ended


def verify_seed(
    ctx: click.Context,
    settings: Settings,
    seed: Path,
    spec: Spec | None,
    *,
    real_weights: bool,
    as_json: bool,
    dry_run: bool = False,
) -> int:
    """Verify a seed, also one that cannot be written, and tell; the exit code: 0 if all of it holds, 1 if nothing does.

    Without a spec, the commands are those that the seed keeps. A store that is no seed stays as open as it was.

    Raises:
        NotFoundError: there is no seed, or it has no command that can be started.
        CorruptError: it is no store of ours.
        LaunchError: the process that starts them died.
    """
    wanted = wanted_of(seed, spec)
    if dry_run:
        show(wanted, as_json=as_json)
        return 0
    sealed = is_sealed(seed)
    proofs = proven(ctx, settings, seed, wanted, real_weights=real_weights)
    with suppress(StoreError):  # in an image that runs; the answer is what counts there
        keep(LocalStore(seed), proofs)
        if sealed:
            seal(seed)
    if as_json:
        output.document(proofs=proofs)
    say(proofs)
    good = sum(proof.holds for proof in proofs)
    return share(good, len(proofs))


def keep(store: Store, proofs: Sequence[Proof]) -> None:
    """Note beside the captures of a store what holds of them.

    Raises:
        StoreError: it cannot be written.
    """
    clock = WallClock()
    for proof in proofs:
        if proof.holds:
            verified.note(store, proof.record(os.uname().nodename, clock.text()))


def told(proof: Proof) -> str:
    """A proof in a sentence."""
    if not proof.holds:
        return f"{proof.name}: not verified: {'; '.join(proof.faults)}"
    return f"{proof.name}: verified on {proof.device}, 0 added, no compiler ran · {output.seconds(proof.seconds)}"


def say(proofs: Sequence[Proof]) -> None:
    """Tell a person what was seen."""
    for proof in proofs:
        output.note(output.brief(told(proof)))
    if any(proof.network != "none" for proof in proofs):
        output.note("the network could not be taken away, as that needs root; proxies were")


@click.command(hidden=True)
@click.option("--seed", required=True)
@click.option("--network", type=click.Choice(get_args(Network)), required=True)
@click.option("--real-weights", is_flag=True)
@click.argument("place")
@click.pass_context
def prove(ctx: click.Context, seed: str, network: Network, real_weights: bool, place: str) -> None:
    """Start each command of the spec in PLACE from a seed alone. Started by us, in the network that it is told of."""
    if network == "none":
        isolation.raise_loopback()
    settings = settings_of(ctx)
    machinery = Machinery(open_cache(settings, os.environ), WallClock(), Telling(None), new_launch, free_port)
    template = template_of(settings, sender=None)
    proofs: list[Proof] = []
    _answer(place, proofs)
    with talk_apart():
        for number, entry in enumerate(load(Path(place, _COMMANDS)).entries):
            own = Path(place, str(number))
            trial = Trial(Path(seed), own, network)
            proofs.append(prove_entry(entry, template, trial, machinery, Options(real_weights=real_weights)))
            _answer(place, proofs)
            shutil.rmtree(own, ignore_errors=True)  # what is left goes with PLACE, whose maker outlives us


def _answer(place: str, proofs: Sequence[Proof]) -> None:
    """What was seen so far, whole: we may die of the next entry."""
    places.write_private(Path(place, _ANSWER), msgspec.json.encode(_Answer(tuple(proofs))))
