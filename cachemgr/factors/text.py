"""Text of a command or a variable may hold bytes that are no UTF-8, or a secret; a factor must be writable as JSON, and
fit to be read by anybody."""

from cachemgr import digest
from cachemgr.sensitive import without_secrets


def encodable(text: str) -> str:
    """`text` with every lone surrogate (an undecodable byte of argv or environ) spelled out as `\\udcXX`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def told(text: str) -> str:
    """`text` as people may read it: sealed as a whole where a secret can be recognised in it."""
    return text if without_secrets(text) == text else digest.sealed(text)
