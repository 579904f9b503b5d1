"""Every failure that a person should read, with its exit code and what to type next.

One boundary (`cachemgr.cli`) turns these into `error:` and `hint:` lines and an exit code. Anything else that reaches
that boundary is a bug and keeps its traceback.

Exit codes: 0 done, 1 the answer is no, 2 usage, 3 partly done, 10 no such artifact or store, 11 in use or locked,
12 untrusted or corrupt, 13 mirror or database unreachable, 130 interrupted. `run` returns the child's own code
(128+n for a signal), 125 when cachemgr itself failed, 126 or 127 when the command cannot be executed.
"""


class CacheError(Exception):
    """Something a person has to know. `str()` is one sentence that names the thing; `hint` is what to type."""

    exit_code = 1
    word = "failed"
    """What kind of failure it is, in a line or a report; failures are counted by it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def in_words(error: Exception) -> str:
    """What an error says to a person: of the system's own, what was refused and where, and never its Python type."""
    if isinstance(error, CacheError):
        return str(error)
    if isinstance(error, OSError) and (said := error.strerror or str(error)):
        return f"{error.filename}: {said}" if isinstance(error.filename, str) else said
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    return f"{type(error).__name__}: {error}"


class UsageError(CacheError):
    """What was asked for cannot be meant: an unknown value, a setting of the wrong type, two options that exclude."""

    exit_code = 2


class NotFoundError(CacheError):
    """No such artifact, capture or store."""

    exit_code = 10
    word = "absent"


class InUseError(CacheError):
    """Somebody uses it, or keeps it: a pin, a lock."""

    exit_code = 11
    word = "in use"


class CorruptError(CacheError):
    """Bytes are not what their manifest, digest or layout says: torn, foreign, hostile or from a newer cachemgr."""

    exit_code = 12
    word = "damaged"


class UntrustedError(CacheError):
    """A capture may be sound, and nobody who is trusted says so."""

    exit_code = 12
    word = "untrusted"


class StoreError(CacheError):
    """The store cannot be read or written: permissions, a full disk, a file system that refuses."""

    exit_code = 13


class DeniedError(StoreError):
    """One object of the store may not be read by this user; others may."""

    word = "denied"


class MirrorError(StoreError):
    """The mirror cannot be used; `word` says why: denied, throttled, … (`cachemgr.store.s3.faults`)."""

    def __init__(self, message: str, *, word: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.word = word


class MirrorDeniedError(MirrorError, DeniedError):
    """The mirror does not let this user read or write something."""


class DatabaseError(CacheError):
    """The catalogue cannot be read or written: its server does not answer, its file is held by others, or a newer
    cachemgr has made it. Nothing but statistics depends on it."""

    exit_code = 13
    word = "unreachable"


class RegistryError(StoreError):
    """A registry of images cannot be used; `word` says why: denied, unreachable, refused, garbled."""

    def __init__(self, message: str, *, word: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.word = word


class DeadlineError(CacheError):
    """The cache took longer than a start may be delayed."""

    word = "deadline"


class NoThreadError(CacheError):
    """The kernel gives this process no further thread, so that a store cannot be read or written."""

    exit_code = 13
    word = "no threads"


class LaunchError(CacheError):
    """cachemgr itself failed in front of a command, and `--strict` asked not to go on without the cache."""

    exit_code = 125


class NoProcessError(LaunchError):
    """The kernel gives us no process for the command, which may still have ours."""


class CannotExecuteError(CacheError):
    """The command exists and cannot be executed."""

    exit_code = 126


class NoSuchCommandError(CacheError):
    """The command does not exist."""

    exit_code = 127
