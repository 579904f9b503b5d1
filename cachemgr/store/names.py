"""Names of objects, and what they are not: the same in a directory and in a bucket, so that each can copy the other."""

from cachemgr.capture import is_safe_path

SCRATCH = "tmp"
"""Where what is being written lies. It is no object and in no listing."""


def is_name(name: str) -> bool:
    """Whether this can be an object's name: not of scratch, not hidden (what NFS keeps of deleted files), and no mark
    of a directory, which some tools leave in buckets."""
    parts = name.split("/")
    return is_safe_path(name) and parts[0] != SCRATCH and not any(part.startswith(".") for part in parts)


def is_prefix(prefix: str) -> bool:
    """Whether objects can be listed by this: a directory with its `/`, or nothing for all of them."""
    return not prefix or (prefix.endswith("/") and is_safe_path(prefix[:-1]))
