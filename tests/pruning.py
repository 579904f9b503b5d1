"""Stores with a history, for tests about what is removed from them: artifacts of known age, use, model and versions."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cachemgr.clock import written
from cachemgr.history import LastUses, last_uses
from cachemgr.key import Factor, Key, derive
from cachemgr.prune.artifacts import Plan, Wish, carry_out, plan
from cachemgr.prune.limits import Limits
from cachemgr.store import Store, records
from cachemgr.store.outlines import Outlines
from cachemgr.trust import Trust, policies_of
from tests import trees
from tests.conftest import NOW
from tests.test_capture import LAUNCH

DAY = 86400.0
TRUST = Trust(policies_of((), private=True))


def factors_of(name: str, **others: str) -> tuple[Factor, ...]:
    """Those of the artifact called `name`; `others` by name of the factor."""
    changed = {factor.name: factor for factor in trees.changed("vllm.max_model_len", name)}
    changed.update((key, Factor(key, value, changed[key].role)) for key, value in others.items())
    return tuple(changed[key] for key in sorted(changed))


def key_of(name: str, **others: str) -> Key:
    return derive(factors_of(name, **others))


def add(
    store: Store,
    live: Path,
    name: str,
    *,
    age: float = 40,
    used: Iterable[float] = (),
    kernels: Sequence[str] = (),
    model: str = "llama",
    version: str | None = "0.32.0",
    torch: str = "2.13.0",
) -> Key:
    """An artifact that was made `age` days ago of these kernels (one of its own unless told), and used so many days
    ago."""
    factors = factors_of(name, torch=torch)
    root = live / "-".join((name, *kernels))
    for seed in kernels or (name,):
        trees.triton_kernel(root / "triton", seed)
    draft = msgspec.structs.replace(
        trees.draft(factors, created=written(NOW - age * DAY), launch=f"made-{name}"),
        model=model,
        engine_version=version,
    )
    trees.publish_trees(store, trees.live(root), draft)
    for number, ago in enumerate(used):
        use(store, derive(factors), f"{name}-{number}", days=ago, version=version)
    return derive(factors)


def use(store: Store, key: Key, launch: str, *, days: float, version: str | None = "0.32.0") -> None:
    """A record that an artifact was used so many days ago."""
    changed = {"launch": launch, "key": key, "artifact": key, "result": "exact", "verdict": "used", "engine": "vllm"}
    started = written(NOW - days * DAY)
    records.record(store, msgspec.structs.replace(LAUNCH, **changed, engine_version=version, started=started))


def settle(root: Path, *, days: float = 2) -> None:
    """Let everything in a directory store look so many days old."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (NOW - days * DAY, NOW - days * DAY))


def planned(store: Store, limits: Limits | None = None, **more: object) -> Plan:
    wish = msgspec.structs.replace(Wish(limits or Limits()), **more)
    root = Path(str(store)) if Path(str(store)).is_dir() else None
    return plan(
        store, wish, outlines=Outlines(), uses=uses(store), judge=TRUST.opinion, root=root, free=10**9, now=float(NOW)
    )


def uses(store: Store) -> LastUses:
    return last_uses(records.launches(store))


def pruned(store: Store, limits: Limits | None = None, **more: object) -> Plan:
    """Plan, do it, and return what was done."""
    return carry_out(store, planned(store, limits, **more), outlines=Outlines(), now=float(NOW))
