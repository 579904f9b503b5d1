"""A check of the catalogue. No start depends on it: only a server that was asked for and fails is an error."""

from collections.abc import Iterator
from contextlib import closing

from cachemgr.doctor.finding import Finding, Opened, Patient, error, note, ok
from cachemgr.errors import CacheError


def catalogue(_patient: Patient, opened: Opened) -> Iterator[Finding]:
    """A server answers and has tables that we can read and write. A file is made when it is asked for."""
    url = opened.settings.database_url
    if url is None:
        yield ok("catalogue", f"is a file in {opened.cache.home}, made when it is asked for")
        return
    from cachemgr.catalogue.opened import open_catalogue  # heavy, and not needed without a server

    try:
        found = open_catalogue(url, opened.cache.home)
        with closing(found):
            found.check()
    except CacheError as failure:
        yield error("catalogue", str(failure), "correct CACHEMGR_DATABASE_URL; starts go on without it")
        return
    yield note("catalogue", found.note) if found.note else ok("catalogue", f"{found} answers")
