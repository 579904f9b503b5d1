"""Claims by way of a service, for machines that may not write them into the store of their fleet.

The service keeps them there (`cachemgr.store.claims`), so that those who write them themselves and those who have them
written wait for each other. Who may read the store watches it there and not through the service, which thus has little
to do, and may be away, while a fleet waits.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from cachemgr.bounded import within
from cachemgr.clock import Clock
from cachemgr.errors import DeadlineError, DeniedError, StoreError, UsageError
from cachemgr.key import Key
from cachemgr.service import ConflictError, Service, segment
from cachemgr.store.claims import Claims, InStore, Mark, Owner

T = TypeVar("T")

_PATIENCE_SECONDS = 6.0
"""For how long one question is asked again while the service does not answer it: a replica that is exchanged, or has
much to do, is back by then."""
_PAUSE_SECONDS = 0.5
_LEAST_SECONDS = 1.0


class _Claim(msgspec.Struct, frozen=True):
    """The newest claim, as the service tells it."""

    number: int | None
    owner: Owner | None
    modified: float | None


class _Taken(msgspec.Struct, frozen=True):
    number: int | None


class _Held(msgspec.Struct, frozen=True):
    held: bool


class ByService:
    """The claims on a key that a service keeps, for the launch of this name, which waits `until` then by its clock."""

    def __init__(self, service: Service, key: Key, launch: str, clock: Clock, *, until: float) -> None:
        self._service, self._launch, self._clock, self._until = service, launch, clock, until
        self._path = f"/v1/claims/{segment(key)}"
        self._told = _Claim(None, None, None)

    def __str__(self) -> str:
        return f"the service {self._service}"

    def open(self) -> None:
        """Nothing: the first question shows whether the service lets us."""

    def newest(self) -> Mark | None:
        """The claim that counts. One request.

        Raises:
            StoreError: the service does not answer, or to no end.
            UsageError: it does not know our token, or lets it not.
            CorruptError: it is none of ours.
        """
        self._told = told = self._patiently(lambda: self._service.get(self._path, _Claim))
        return None if told.number is None else Mark(told.number, told.modified or 0.0)

    def owner_of(self, number: int) -> Owner | None:
        """Who has the claim that `newest` has told of last."""
        return self._told.owner if number == self._told.number else None

    def take(self, owner: Owner, *, after: int) -> int | None:
        """Take the claim after this one. Asked twice it is taken once, as the owner is us both times."""
        body = msgspec.json.encode({"owner": owner, "after": after or None})
        return self._patiently(lambda: self._service.post(self._path, body, _Taken)).number

    def beat(self, number: int) -> bool:
        """Show that we live. Whether the claim is still ours."""
        try:
            return self._service.put(f"{self._path}/{number}", _Held, launch=self._launch).held
        except ConflictError:
            return False

    def give_up(self, number: int) -> None:
        """Let others have the key, unless another launch has it by now."""
        with suppress(ConflictError):
            self._service.delete(f"{self._path}/{number}", _Held, launch=self._launch)

    def _patiently(self, question: Callable[[], T]) -> T:
        """The answer, of a service that may be away for a moment. Whose time is up gets an answer now or never."""
        now = self._clock.monotonic()
        end = min(now + _PATIENCE_SECONDS, max(self._until, now + _LEAST_SECONDS))
        while True:
            try:
                return within(end - now, f"asking {self}", question)
            except DeadlineError as error:
                raise StoreError(f"{self} does not answer: {error}", hint="cachemgr doctor") from None
            except StoreError:
                now = self._clock.monotonic() + _PAUSE_SECONDS
                if now >= end:
                    raise
                self._clock.sleep(_PAUSE_SECONDS)


class WithService:
    """The claims on a key in a store, as far as we may; what we may not, a service does that keeps them there."""

    def __init__(self, store: InStore, service: ByService) -> None:
        self._store, self._service = store, service
        self._reader: Claims = store
        self._writer: Claims = store

    def __str__(self) -> str:
        return str(self._store if self._writer is self._store else self._service)

    def open(self) -> None:
        """See that it is a store of ours. One that is new and not ours to write becomes one when we take a claim.

        Raises:
            StoreError, CorruptError: as `InStore.open`.
        """
        with suppress(DeniedError):
            self._store.open()

    def newest(self) -> Mark | None:
        """The claim that counts. Raises as that of the store or of the service."""
        try:
            return self._reader.newest()
        except DeniedError:
            self._reader = self._writer = self._service
            return self._reader.newest()

    def owner_of(self, number: int) -> Owner | None:
        """Who has this claim."""
        return self._reader.owner_of(number)

    def take(self, owner: Owner, *, after: int) -> int | None:
        """Take the claim after this one.

        Raises:
            UsageError: the service does not let us, or keeps the claims of another store, which nobody would see.
            StoreError: neither the store nor the service takes it.
        """
        try:
            return self._writer.take(owner, after=after)
        except DeniedError:
            self._writer = self._service
        number = self._service.take(owner, after=after)
        if number is not None and self._reader is self._store and self._store.owner_of(number) != owner:
            self._service.give_up(number)
            raise UsageError(
                f"{self._service} keeps the claims of another store than {self._store}",
                hint="set CACHEMGR_SERVER to the service of this mirror",
            )
        return number

    def beat(self, number: int) -> bool:
        """Show that we live."""
        return self._writer.beat(number)

    def give_up(self, number: int) -> None:
        """Let others have the key."""
        self._writer.give_up(number)
