"""What a catalogue calls the stores that it has read.

One name for one store, from whatever host: hosts that share a store would else read it once each and know of it under
as many names as they have. And never one name for two stores: what was last read would be taken for what the other has.
"""

import os

from cachemgr.catalogue.opened import Catalogue
from cachemgr.places import exported_place, nearest
from cachemgr.store import Remote, Store


def source_name(catalogue: Catalogue, store: Store, host: str) -> str:
    """How `catalogue` knows a store on this `host`.

    A bucket has its URL. A directory beneath that of a catalogue's own file is named by the way from there, because
    both are on one volume, whoever mounts it; one on a network's file system by what its server calls it. Any other
    directory is this host's own, since others may have another one of that path.
    """
    if isinstance(store, Remote):
        return str(store)
    place = os.path.realpath(str(store))
    beside = _way_from(catalogue, place)
    if beside is not None:
        return f"./{beside}"
    return exported_place(place) or f"{host}:{store}"


def _way_from(catalogue: Catalogue, place: str) -> str | None:
    """The way from the directory of the catalogue's file to one beneath it, on the same device."""
    file = catalogue.engine.url.database if catalogue.engine.dialect.name == "sqlite" else None
    if not file:
        return None
    directory = os.path.dirname(os.path.realpath(file))
    way = os.path.relpath(place, directory)
    if way == os.pardir or way.startswith(f"{os.pardir}/"):
        return None
    try:
        alike = os.stat(nearest(place)).st_dev == os.stat(directory).st_dev
    except OSError:
        return None
    return way if alike else None
