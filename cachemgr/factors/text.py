"""Text of a command or a variable may hold bytes that are no UTF-8; a factor must always be writable as JSON."""


def encodable(text: str) -> str:
    """`text` with every lone surrogate (an undecodable byte of argv or environ) spelled out as `\\udcXX`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
