"""Commands of those who answer for captures: `keygen` and `sign`."""

import os
import shlex
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import click

from cachemgr import sign as journey
from cachemgr.cli import EXIT_CODES, output
from cachemgr.cli.session import cache_of, on_mirror, settings_of, store_of
from cachemgr.clock import written
from cachemgr.errors import CacheError, UsageError
from cachemgr.key import Key
from cachemgr.settings import typed_age
from cachemgr.signature import Signer, new_private_key
from cachemgr.store import Store, layout
from cachemgr.store.captures import Damaged, captures
from cachemgr.trust import Trust

_ENV, _COMMAND = "env:", "command:"
_KEY_LIMIT = 1 << 16
_COMMAND_SECONDS = 120
_WHERE = "--key FILE, --key env:NAME or --key 'command:WORDS'"


@click.command(epilog=EXIT_CODES)
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
def keygen(file: str, as_json: bool) -> None:
    """Make a key that signs captures: the private one in FILE, for its owner only, the public one in FILE.pub.

    Whoever has FILE can have code run on every machine that trusts it; FILE.pub may be known to all.
    """
    private, public = Path(file), Path(f"{file}.pub")
    pem = new_private_key()
    key = Signer(pem, where=file).public
    _write_new(private, pem, 0o600)
    try:
        _write_new(public, f"{key} # {key.id}\n".encode(), 0o644)
    except CacheError:
        private.unlink()
        raise
    if as_json:
        output.document(id=key.id, public=str(key), private_file=str(private), public_file=str(public))
        return
    output.record([("id", key.id), ("public", str(key)), ("private", f"{private} (keep it secret)")])
    output.note(f"machines trust it with CACHEMGR_TRUSTED_KEYS={key}, or a copy of {public}")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except FileExistsError:
        raise UsageError(f"{path} exists, and a key is never overwritten", hint="give another name") from None
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a directory of yours"
        ) from None


@click.command(epilog=EXIT_CODES)
@click.argument("names", nargs=-1, required=True, metavar="KEY|CAPTURE...")
@click.option("--key", "sign_key", metavar="WHERE", help="private key: a file, env:NAME or command:WORDS")
@click.option("--expires", metavar="AGE", help="the signature counts for so long, such as 90d")
@click.option("--again", is_flag=True, help="also what this key has signed, so that its signature is new")
@click.option(
    "--accept-unverified-origin", "accept", is_flag=True, help="answer for captures that nobody who is trusted made"
)
@click.option("--dry-run", is_flag=True, help="say what would be signed, and stop")
@on_mirror
@click.option("--json", "as_json", is_flag=True, help="one JSON document")
@click.pass_context
def sign(
    ctx: click.Context,
    names: tuple[str, ...],
    sign_key: str | None,
    expires: str | None,
    again: bool,
    accept: bool,
    dry_run: bool,
    mirror: bool,
    as_json: bool,
) -> None:
    """Verify captures to the last byte and sign them; let those in that wait in incoming/.

    KEY may be a prefix; a capture is named by sha256: and the beginning of its digest. Machines that trust the key use
    what it signed, and execute it: sign what you made, or have verified.
    """
    settings = settings_of(ctx, sign_key=sign_key)
    lasts = None if expires is None else _age(expires)
    signer = signing_key(settings.sign_key, os.environ)
    cache = cache_of(ctx)
    store = store_of(cache, mirror=mirror)
    found = [
        each
        for name in names
        for each in journey.candidates(store, name, cache.trust, signer.public)
        if again or each.waiting or not each.signed
    ]
    journey.require_origin(found, cache.trust.revoked, accept=accept)
    now = time.time()
    if not dry_run:
        until = None if lasts is None else written(now + lasts)
        for each in found:
            journey.sign(store, each, signer, signed=written(now), expires=until)
    _print(found, signer, dry_run=dry_run, as_json=as_json)


def sign_seed(seed: Store, keys: Iterable[Key], trust: Trust, signer: Signer | None) -> None:
    """Sign what was just copied into a seed from a level that is trusted; without a key, say what that means.

    Raises:
        CorruptError, StoreError: a capture is damaged, or the seed cannot be written.
    """
    damaged: list[Damaged] = []
    if signer is None:
        beside = [name for key in keys for capture in captures(seed, key, damaged) for name in capture.beside]
        if not any(map(layout.signer_of, beside)):
            output.note("the seed has no signature: sign it with --sign-key, or pods need CACHEMGR_TRUST=seed=off")
        return
    for key in keys:
        for each in journey.candidates(seed, key, trust, signer.public):
            if not each.signed:
                journey.sign(seed, each, signer, signed=written(time.time()), expires=None)


def _print(found: list[journey.Candidate], signer: Signer, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        rows = [
            {"capture": each.capture.digest, "key": each.key, "waiting": each.waiting, "by": each.by} for each in found
        ]
        output.document(signer=signer.public.id, signed=rows, dry_run=dry_run)
        return
    verb = "would sign" if dry_run else "signed"
    for each in found:
        waited = ", which waited" if each.waiting else ""
        output.note(f"{verb} capture {output.short(each.capture.digest)} of {output.short(each.key)}{waited}")
    if not found:
        output.note(f"everything is signed by key {signer.public.id} already")


def _age(text: str) -> float:
    try:
        return typed_age(text)
    except ValueError as error:
        raise UsageError(f"`--expires` {error}, not `{text}`", hint="--expires 90d") from None


def signing_key(where: str | None, environ: Mapping[str, str]) -> Signer:
    """The private key that the setting `sign_key` names."""
    if where is None:
        raise UsageError("no signing key is set", hint="cachemgr keygen FILE, then --key FILE or CACHEMGR_SIGN_KEY")
    if where.startswith(_ENV):
        name = where.removeprefix(_ENV)
        if not environ.get(name):
            raise UsageError(
                f"the variable {name}, which should hold the signing key, is not set", hint=f"set {name}, or {_WHERE}"
            )
        return Signer(environ[name].encode("utf-8", "surrogateescape"), where=f"the variable {name}")
    if where.startswith(_COMMAND):
        return Signer(_said_by(where.removeprefix(_COMMAND)), where=f"what `{where[:80]}` printed")
    return Signer(_read(Path(where).expanduser()), where=where)


def _said_by(line: str) -> bytes:
    """What a command prints. It gets no shell; what it says on stderr, and asks on the terminal, is between the two."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"`{line}` is no command: {error}", hint=_WHERE) from None
    if not words:
        raise UsageError(f"nothing follows `{_COMMAND}`", hint=_WHERE)
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, check=False, timeout=_COMMAND_SECONDS)
    except (OSError, ValueError) as error:
        raise UsageError(f"`{line}` cannot be executed: {error}", hint=_WHERE) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"`{line}` gave no key in {_COMMAND_SECONDS} s", hint=_WHERE) from None
    if done.returncode:
        raise UsageError(f"`{line}` gave no key: exit code {done.returncode}", hint=_WHERE)
    if len(done.stdout) > _KEY_LIMIT:
        raise UsageError(f"`{line}` gave no key: it printed more than {_KEY_LIMIT:,} bytes", hint=_WHERE)
    return done.stdout


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_KEY_LIMIT)
    except OSError as error:
        raise UsageError(f"the signing key {path} cannot be read: {error.strerror}", hint=_WHERE) from None
    if mode & 0o027:
        raise UsageError(
            f"the signing key {path} has mode {mode:o}, so that others can use it", hint=f"chmod 600 {path}"
        )
    return data
