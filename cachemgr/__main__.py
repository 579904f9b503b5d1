"""`python -m cachemgr` and the `cachemgr` script."""

import os
import sys


def main() -> None:
    """Everything that is typed begins here."""
    _find_ours_first()
    from cachemgr.cli import main as typed

    typed()


def _find_ours_first() -> None:
    """PYTHONPATH is the command's: what it has of other versions of what we need, for another Python even, must not be
    found before ours. Unless we are there ourselves."""
    given = os.environ.get("PYTHONPATH")
    theirs = {_absolute(place) for place in given.split(os.pathsep)} if given else set()
    if os.path.dirname(os.path.dirname(_absolute(__file__))) not in theirs:
        sys.path.sort(key=theirs.__contains__)


def _absolute(place: str) -> str:
    """As it is in `sys.path`."""
    try:
        return os.path.abspath(place)
    except OSError:  # the working directory was deleted
        return place


if __name__ == "__main__":
    main()
