"""Text from elsewhere on a terminal: names and reasons in a store are chosen by whoever wrote it."""


def plain(text: str) -> str:
    """`text` on one line and without what a terminal obeys: control characters, and those that turn text around."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
