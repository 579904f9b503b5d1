"""Where images go, and what a person types for it."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from cachemgr.digest import is_digest
from cachemgr.errors import UsageError
from cachemgr.oci.documents import Descriptor
from cachemgr.oci.image import Image
from cachemgr.store import Source

_HOST = re.compile(r"(?:[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|localhost|[A-Za-z0-9-]+(?=:)|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""The names that a registry takes (distribution-spec 1.1, "Pulling manifests")."""
_REGISTRY, _LAYOUT = "docker://", "oci:"
"""How skopeo tells a registry from a directory."""


Opened = Callable[[], AbstractContextManager[Source]]
"""Opens a source, from its first byte on, as often as it is called."""


class Target(Protocol):
    """Takes images: first all blobs, then what makes them visible."""

    def has(self, blob: Descriptor) -> bool:
        """Whether a blob is there, so that it need not be put."""

    def put(self, blob: Descriptor, source: Opened) -> None:
        """Keep a blob. What reading it raises is passed on, and nothing is kept then; it is opened again where a
        connection failed half-way.

        Raises:
            StoreError: it cannot be written.
        """

    def publish(self, image: Image) -> None:
        """Make an image visible whose blobs are there, in the place of one of the same name. Raises StoreError."""

    def __str__(self) -> str:
        """How a person names this place."""


class Reference(msgspec.Struct, frozen=True):
    """An image, or a place for one, in a registry."""

    registry: str
    """Host, and port if it has one."""
    repository: str
    tag: str
    """A tag, or the digest of a manifest."""

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}{'@' if is_digest(self.tag) else ':'}{self.tag}"


def reference(text: str) -> Reference | None:
    """What `text` names in a registry, or None when it names a directory or file: it starts with `oci:`, `/`, `.` or
    `~`, or with something that is no host. `docker://` in front says that it is a registry in any case.

    Raises:
        UsageError: it begins with the name of a registry, and goes on as none can.
    """
    if text.startswith(_LAYOUT) or (not text.startswith(_REGISTRY) and not _names_host(text)):
        return None
    host, _slash, rest = text.removeprefix(_REGISTRY).partition("/")
    repository, at, tag = rest.partition("@")
    if not at:
        repository, colon, tag = rest.partition(":")
        tag = tag if colon else "latest"
    fits = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository)
    if not fits or not (is_digest(tag) if at else _TAG.fullmatch(tag)):
        raise UsageError(f"`{text}` names no image in a registry", hint="HOST[:PORT]/REPOSITORY:TAG")
    return Reference(host, repository, tag)


def path(text: str) -> str:
    """The directory or file that `text` names."""
    return text.removeprefix(_LAYOUT)


def _names_host(text: str) -> bool:
    host, slash, _rest = text.partition("/")
    return bool(slash) and not text.startswith((".", "~", "/")) and _HOST.fullmatch(host) is not None
