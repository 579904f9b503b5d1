"""The members of a layer's tar: which are links to which, and how long it is."""

from collections.abc import Iterator, Sequence

from cachemgr.capture import Section, Unit
from cachemgr.digest import Digest
from cachemgr.ustar import BLOCK, header_size, padding

CHUNK = 1 << 20
WINDOW_LOG = 27
END = b"\0" * (2 * BLOCK)

UNREAD = Digest("")
"""The digest of a file that nobody has read yet. `pack` finds it while it copies the bytes, so that they are read once.

Files of one unit that may have equal bytes must not both be unread: which is a link to which is known before."""


def links_in(unit: Unit) -> dict[str, str]:
    """Which members of a unit are stored as a hard link to an earlier one: path to path.

    Equal bytes with equal mode and mtime, in member order. Only inside one unit, so that each unit can be unpacked
    without its neighbours (across units the compression window does the same). Relocated files are never linked,
    because they are equal only until they are placed.
    """
    if len({file.digest for file in unit.files}) == len(unit.files):
        return {}
    first: dict[tuple[Digest, int, int | None], str] = {}
    links: dict[str, str] = {}
    for file in unit.files:
        if file.relocated or file.size == 0 or file.digest == UNREAD:
            continue
        original = first.setdefault((file.digest, file.mode, file.mtime_ns), file.path)
        if original != file.path:
            links[file.path] = original
    return links


def is_read(unit: Unit) -> bool:
    """Whether the digests of all of its files are known."""
    return all(file.digest != UNREAD for file in unit.files)


def tar_size(sections: Sequence[Section]) -> int:
    """Bytes of the tar that `pack` makes of these sections."""
    size = len(END)
    for domain, unit in units_in(sections):
        links = links_in(unit)
        for file in unit.files:
            link = links.get(file.path)
            size += header_size(domain, file, link) + (file.size + padding(file.size) if link is None else 0)
    return size


def units_in(sections: Sequence[Section]) -> Iterator[tuple[str, Unit]]:
    """All units in the order in which the tar holds them, each with its domain."""
    for section in sections:
        for unit in section.units:
            yield section.domain, unit
