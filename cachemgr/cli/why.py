"""Commands that explain: `why` a start was not warm, and what is different between two artifacts (`diff`)."""

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from cachemgr import engine_notes
from cachemgr.cache import Cache
from cachemgr.capture import File, Launch
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.index import asked
from cachemgr.cli.lookup import is_left_alone, looked_up, profile_of
from cachemgr.cli.remote import not_with_a_service, service_of
from cachemgr.cli.session import PASS_THROUGH, cache_of, on_mirror, opened, settings_of, store_of
from cachemgr.digest import Digest
from cachemgr.errors import CacheError, NotFoundError, UsageError
from cachemgr.explain import Account, Case, Told, account, compared, of_launch
from cachemgr.inventory import resolve
from cachemgr.key import Difference, Factor, Key, Role, derive, is_key
from cachemgr.live import live_root
from cachemgr.lookup import Found, kept_out
from cachemgr.service import Service
from cachemgr.store import Store
from cachemgr.store.captures import Capture, captures

_KEY = re.compile(r"k1:?[0-9a-f]*|[0-9a-f]{6,32}")


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@click.option("--launch", metavar="NAME", help="that launch, of any host that the store tells of")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[KEY | -- CMD [ARG]...]")
@click.pass_context
def why(ctx: click.Context, launch: str | None, mirror: bool, as_json: bool, words: tuple[str, ...]) -> None:
    """Say why a start was not warm, or would not be: the nearest artifact, each factor that differs, what to do.

    Without an argument, the last launch on this host; of a KEY, the last one that had it; of CMD, a start of it now.
    """
    if launch is not None and words:
        raise UsageError("`--launch` names a launch, so there can be no key and no command", hint="cachemgr why --help")
    before = bool(words) and not _names_key(words)
    if before:
        _require_command(words, "why")
    if before and is_left_alone(words):
        if as_json:
            output.document(why=None)
        return
    service, cache = service_of(ctx), opened(settings_of(ctx))
    if service is not None:
        not_with_a_service(mirror=mirror)
        told = _of_service(ctx, service, launch, words, before=before)
    elif before:
        told = _before(ctx, cache, words)
    else:
        told = _of_launch(ctx, cache, store_of(cache, mirror=mirror), launch, words[0] if words else None)
    if as_json:
        output.document(why=told)
    else:
        _print(told)


def _of_service(
    ctx: click.Context, service: Service, launch: str | None, words: tuple[str, ...], *, before: bool
) -> Account:
    """The same, by the service."""
    from cachemgr.cli import asking

    if before:
        profile = profile_of(settings_of(ctx), words)
        return asking.why_before(service, profile.factors, profile.host)
    if launch is not None:
        return asking.why(service, launch=launch)
    if words:
        return asking.why(service, key=words[0])
    return asking.why(service, host=os.uname().nodename)


def _names_key(words: Sequence[str]) -> bool:
    return len(words) == 1 and _KEY.fullmatch(words[0]) is not None


def _require_command(words: Sequence[str], verb: str) -> None:
    """Options after a key would be words of a command that has its name."""
    if words[0].startswith("k1:") and _names_key(words[:1]):
        raise UsageError(f"nothing can follow the key {words[0]}", hint=f"cachemgr {verb} --help; options go before it")


def _before(ctx: click.Context, cache: Cache, command: tuple[str, ...]) -> Account:
    """A start that is only asked about."""
    profile, key, found = looked_up(settings_of(ctx), cache, command)
    reasons = [*found.ignored, *found.reasons, *kept_out(found, key)]
    reasons += [f"{each.kind} capture: {each.reason}" for each in found.damaged]
    errors = {"levels ignored": len(found.ignored)} if found.ignored else {}
    case = Case(key, found.result, found.artifact, found.differs, profile.factors, tuple(reasons), errors)
    return account(case, nearest=_factors(found))


def _factors(found: Found) -> Sequence[Factor]:
    return found.captures[0].manifest.factors if found.captures else ()


def _of_launch(ctx: click.Context, cache: Cache, store: Store, name: str | None, key: str | None) -> Account:
    from cachemgr.catalogue.launches import Asked, last, named
    from cachemgr.catalogue.opened import Catalogue

    wanted = Asked(host=os.uname().nodename) if key is None else Asked(key=_whole(store, key))

    def ask(catalogue: Catalogue, source: int) -> Launch | None:
        if name is not None:
            return named(catalogue, source, name)
        return last(catalogue, source, wanted, now=time.time())

    found = asked(ctx, cache, store, ask, damaged=[])
    if found is None:
        whose = "on this host" if key is None else f"of {wanted.key}"
        raise NotFoundError(f"{store} tells of no launch {whose}", hint="cachemgr why -- CMD, before a start")
    nearest = None if found.artifact is None else _capture(cache, store, found.artifact)
    if nearest is None:
        return of_launch(found)
    store_of_it, capture = nearest
    differs = compared(found.factors, capture.manifest.factors)[0].differs if found.factors else found.differs
    here = found.host == os.uname().nodename
    ours = engine_notes.of_live(live_root(os.environ), found) if here else engine_notes.Notes({})
    theirs = engine_notes.of_capture(store_of_it, capture.manifest) if ours.by_model else engine_notes.Notes({})
    engine = engine_notes.says(found, capture.manifest, ours, theirs, differs)
    return of_launch(found, nearest=capture.manifest.factors, engine=engine)


def _whole(store: Store, key: str) -> Key:
    """The key that a prefix means; one whose artifact is gone must be whole."""
    try:
        return resolve(store, key)
    except NotFoundError:
        whole = Key("k1:" + key.removeprefix("k1:"))
        if is_key(whole):
            return whole
        raise


def _capture(cache: Cache, store: Store, key: Key) -> tuple[Store, Capture] | None:
    """A capture of an artifact, from the first store that has one."""
    for each in dict.fromkeys((store, cache.store, *cache.seeds)):
        try:
            held = captures(each, key, [])
        except CacheError:
            continue
        if held:
            return each, held[0]
    return None


def _print(told: Account) -> None:
    pairs = []
    if told.launch is not None:
        pairs.append(("launch", f"{told.launch} · {told.started} on {told.host}"))
    verdict = "" if told.verdict is None else f" · {told.verdict}"
    pairs += [("key", told.key), ("result", f"{told.result}{verdict}"), ("why", told.says)]
    if told.artifact is not None and told.artifact != told.key:
        pairs.append(("artifact" if told.result == "near" else "nearest", told.artifact))
    ends = [("engine", line) for line in told.engine]
    if told.fix:
        ends.append(("to do", told.fix))
    if not told.differs:
        output.record(pairs + ends)
        return
    output.record(pairs)
    for each in told.differs:
        _print_difference(each)
    if ends:
        output.heading("in short")
        output.record(ends)


def _print_difference(told: Told) -> None:
    role: Role = "guard" if told.role == "guard" else "blind" if told.role == "blind" else "match"
    output.heading(output.difference(Difference(told.factor, told.wanted, told.stored, role)))
    pairs = [("  means", told.means)]
    pairs.append(("  harmless", told.harmless or "not known to be"))
    pairs.append(("  to do", told.fix))
    output.record(pairs)


@click.command(context_settings=PASS_THROUGH, epilog=EXIT_CODES)
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.argument("key")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[KEY | -- CMD [ARG]...]")
@click.pass_context
def diff(ctx: click.Context, mirror: bool, as_json: bool, key: str, words: tuple[str, ...]) -> None:
    """Say what differs between two artifacts, factor by factor and file by file, or between an artifact and CMD.

    Exit code 0 if nothing does, else 1.
    """
    held = _holder(ctx, mirror=mirror)
    first = held(key)
    command = words[1:] if words[0] == "--" else words
    if words[0] != "--" and _names_key(words):
        second = held(words[0])
        theirs, name = second[0].manifest.factors, second[0].manifest.key
        files = _files(first, second)
    else:
        _require_command(words, "diff")
        if is_left_alone(command):
            if as_json:
                output.document(first=first[0].manifest.key, second=None, result="none", differs=(), files=())
            ctx.exit(1)
        theirs, files = profile_of(settings_of(ctx), command).factors, []
        name = derive(theirs)
    found, told = compared(first[0].manifest.factors, theirs)
    if as_json:
        changed = [{"path": path, "first": ours, "second": other} for path, ours, other in files]
        output.document(first=first[0].manifest.key, second=name, result=found.result, differs=told, files=changed)
    else:
        _print_comparison(first[0].manifest.key, name, told, files)
    ctx.exit(1 if told or files else 0)


def _holder(ctx: click.Context, *, mirror: bool) -> Callable[[str], Sequence[Capture]]:
    """What says which captures a key has, by the whole of it or its beginning: a store, or a service."""
    service = service_of(ctx)
    if service is None:
        return partial(_held, store_of(cache_of(ctx), mirror=mirror))
    not_with_a_service(mirror=mirror)
    from cachemgr.cli import asking

    return lambda text: asking.captures_of(asking.artifact(service, text))


def _held(store: Store, text: str) -> Sequence[Capture]:
    """The captures of an artifact.

    Raises:
        NotFoundError: it has none that can be read.
    """
    key = resolve(store, text)
    held = captures(store, key, [])
    if not held:
        raise NotFoundError(f"no capture of {key} in {store} can be read", hint=f"cachemgr show {key[:12]}")
    return held


def _files(first: Sequence[Capture], second: Sequence[Capture]) -> list[tuple[str, Digest | None, Digest | None]]:
    """Files that only one of the two has, or that have other bytes, with the digests of both."""
    ours, theirs = _by_path(first), _by_path(second)
    return [
        (path, _digest(ours.get(path)), _digest(theirs.get(path)))
        for path in sorted(ours.keys() | theirs.keys())
        if _digest(ours.get(path)) != _digest(theirs.get(path))
    ]


def _digest(file: File | None) -> Digest | None:
    return None if file is None else file.digest


def _by_path(held: Sequence[Capture]) -> dict[str, File]:
    """Of several captures of one artifact the first counts, as for a restore."""
    found: dict[str, File] = {}
    for capture in held:
        for _layer, section in capture.manifest.sections():
            for file in section.files():
                found.setdefault(f"{section.domain}/{file.path}", file)
    return found


def _print_comparison(
    first: Key, second: Key, told: Sequence[Told], files: Sequence[tuple[str, Digest | None, Digest | None]]
) -> None:
    output.record([("first", first), ("second", second)])
    if not told and not files:
        output.heading("nothing differs")
    for each in told:
        _print_difference(each)
    if files:
        output.heading(f"{output.counted(len(files), 'file')} that differ or that one has")
        rows = [(path, *(output.short(digest) if digest else "-" for digest in pair)) for path, *pair in files]
        output.table(("FILE", "FIRST", "SECOND"), rows, flexible="FILE")
