"""The entries of a spec, one after the other: one that fails loses no other, and what is done is not done again.

What became of each entry is kept in a state file beside the work, under a fingerprint of the entry. An entry that is
done there is skipped only after a look-up that finds its artifact: the store may have lost it, or the machine changed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cachemgr import places
from cachemgr.cache import Cache
from cachemgr.digest import fingerprint
from cachemgr.errors import CacheError, CorruptError, StoreError
from cachemgr.factors import describe
from cachemgr.factors.host import visible_gpus
from cachemgr.factors.program import shown
from cachemgr.key import Key, derive
from cachemgr.lookup import Found, find
from cachemgr.order import Order
from cachemgr.prewarm.passes import Machinery, Options, Result, State, prewarm
from cachemgr.prewarm.starting import starting, without_build_variables
from cachemgr.spec import Entry, Spec

STATE_SCHEMA = 1
_MOST_BYTES = 16 << 20


class Done(msgspec.Struct, frozen=True):
    """What became of an entry the last time."""

    entry: str
    """Fingerprint of the entry."""
    state: State
    key: Key | None
    reason: str
    at: str
    """RFC 3339, UTC."""


class _File(msgspec.Struct, frozen=True):
    schema: int
    entries: dict[str, Done]


class Record:
    """The state file of a spec."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = self._read()

    def _read(self) -> dict[str, Done]:
        try:
            with self._path.open("rb") as file:
                found = msgspec.json.decode(file.read(_MOST_BYTES), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptError(f"state {self._path} cannot be read: {error}", hint="remove it to start anew") from None
        if found.schema != STATE_SCHEMA:
            raise CorruptError(f"state {self._path} is of a newer cachemgr", hint="upgrade cachemgr, or remove it")
        return found.entries

    def forget(self, entries: Iterable[Entry]) -> None:
        """Start anew with these; what became of others still counts."""
        names = {entry.name for entry in entries}
        self._entries = {name: done for name, done in self._entries.items() if name not in names}

    def of(self, entry: Entry) -> Done | None:
        """What became of this very entry."""
        found = self._entries.get(entry.name)
        return found if found is not None and found.entry == _print_of(entry) else None

    def note(self, entry: Entry, result: Result, at: str) -> None:
        """Keep what became of an entry; whole or not at all.

        Raises:
            CorruptError: somebody else wrote what is none.
            StoreError: it cannot be written.
        """
        done = Done(_print_of(entry), result.state, result.key, result.reason, at)
        self._entries[entry.name] = done
        # Another process may do other entries of the same spec on another GPU, and note them here.
        everything = {**self._read(), entry.name: done}
        data = msgspec.json.encode(_File(STATE_SCHEMA, everything), order="sorted")
        try:
            places.write_private(self._path, data)
        except OSError as error:
            raise StoreError(f"state {self._path} cannot be written: {error.strerror}", hint="--state FILE") from None


def _print_of(entry: Entry) -> str:
    return fingerprint(msgspec.json.encode(entry, order="sorted"))


def order_of_entry(entry: Entry, template: Order) -> Order:
    """The order to start an entry: `template` has everything but its command and its variables."""
    environ = without_build_variables(template.environ) | entry.env
    return msgspec.structs.replace(template, argv=entry.command, environ=environ)


class Planned(msgspec.Struct, frozen=True):
    """What would be done for one entry."""

    name: str
    action: Literal["start", "skip", "none"]
    """`none`: it cannot be done here."""
    key: Key | None
    found: Literal["exact", "near", "none"] | None
    """What a look-up finds now; None where the command cannot be read."""
    command: tuple[str, ...]
    """What would be started, without its secrets."""
    note: str


def plan(spec: Spec, template: Order, machinery: Machinery, options: Options, record: Record | None) -> list[Planned]:
    """What `prewarm_all` would do now."""
    return [_planned(entry, template, machinery, options, record) for entry in spec.entries]


def _planned(entry: Entry, template: Order, machinery: Machinery, options: Options, record: Record | None) -> Planned:
    order = order_of_entry(entry, template)
    lack = missing_gpus(entry, order.environ)
    try:
        key, found = looked_up(order, machinery.cache)
        made = starting(
            order.argv, order.environ, order.cwd, port=machinery.free_port(), real_weights=options.real_weights
        )
    except CacheError as error:
        return Planned(entry.name, "none", None, None, shown(entry.command), str(error))
    if lack:
        return Planned(entry.name, "none", key, found.result, shown(entry.command), lack)
    done = None if record is None else record.of(entry)
    skips = found.result == "exact" and (options.if_missing or (done is not None and done.state == "warm"))
    return Planned(entry.name, "skip" if skips else "start", key, found.result, shown(made.executes), made.note)


def prewarm_entry(entry: Entry, template: Order, machinery: Machinery, options: Options) -> Result:
    """Start one entry until a start adds nothing. Its own time limit counts, and what it needs of GPUs.

    Whatever goes wrong is in the answer: another entry may go well.
    """
    order = order_of_entry(entry, template)
    lack = missing_gpus(entry, order.environ)
    if lack:
        return Result(entry.name, "no GPU", None, lack)
    try:
        return prewarm(entry.name, order, machinery, msgspec.structs.replace(options, limit=entry.limit))
    except CacheError as error:
        return Result(entry.name, "failed", None, f"{error}" + (f" ({error.hint})" if error.hint else ""))


def prewarm_all(
    spec: Spec,
    template: Order,
    machinery: Machinery,
    options: Options,
    record: Record | None,
    *,
    begin: Callable[[Entry], None],
) -> tuple[Result, ...]:
    """All entries, in their order; `begin` is told which one comes. Without a record, nothing is skipped or kept.

    Raises:
        StoreError: the record cannot be written.
    """
    results = []
    for entry in spec.entries:
        begin(entry)
        result = _already(entry, template, machinery.cache, record, if_missing=options.if_missing)
        if result is None:
            result = prewarm_entry(entry, template, machinery, options)
            if record is not None:
                record.note(entry, result, machinery.clock.text())
        results.append(result)
    return tuple(results)


def _already(entry: Entry, template: Order, cache: Cache, record: Record | None, *, if_missing: bool) -> Result | None:
    """The answer for an entry that is done, or that may be done by others, and whose artifact a look-up finds; None for
    any other."""
    done = None if record is None else record.of(entry)
    if (done is None or done.state != "warm") and not if_missing:
        return None
    try:
        key, found = looked_up(order_of_entry(entry, template), cache)
    except CacheError:
        return None
    if found.result != "exact":
        return None
    if done is not None and done.state == "warm":
        return Result(entry.name, "already warm", key, f"since {done.at}")
    where = "local store" if found.where == "local" else found.where
    return Result(entry.name, "already warm", key, f"in the {where}")


def looked_up(order: Order, cache: Cache) -> tuple[Key, Found]:
    """The key of an order, and what the levels of the cache have for it.

    Raises:
        CacheError: as `cachemgr.factors.describe` and `cachemgr.lookup.find`.
    """
    profile = describe(order.argv, order.environ, cwd=order.cwd, ignored_args=order.ignored_args)
    key = derive(profile.factors)
    without = cache.avoided(order.host)
    return key, find(cache.levels, key, profile.factors, profile.host, model=profile.model, without=without)


def missing_gpus(entry: Entry, environ: Mapping[str, str]) -> str:
    """What this machine lacks of the GPUs that an entry needs, for people; empty for nothing."""
    if not entry.gpus:
        return ""
    names = visible_gpus(environ)
    fitting = [name for name in names if entry.gpu is None or entry.gpu.lower() in name.lower()]
    if len(fitting) >= entry.gpus:
        return ""
    return f"needs {entry.wanted_gpus}, and here {_there(names)}"


def _there(names: Sequence[str]) -> str:
    counted = {name: names.count(name) for name in dict.fromkeys(names)}
    told = ", ".join(f"{count} of {name}" for name, count in counted.items())
    return f"are {told}" if told else "is none"
