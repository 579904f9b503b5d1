"""Pack and unpack one layer: a deterministic tar inside zstd, written for any tool and read only against its manifest.

The tar is canonical: members in manifest order, owner 0:0, mode 0644 or 0755, mtime 0 unless the manifest keeps one,
equal files stored once with hard links after. `tar -xf` and OCI tools open it.

Reading never parses a tar header. The manifest says which files follow in which order and how long each is, so the
offset of every byte is known beforehand; the digests say whether the bytes are right. A hostile archive therefore has
no member names, links, devices or lengths for us to be fooled by, and the reader is a third of the cost of `tarfile`.
"""

from cachemgr.layer.files import open_quietly, read_file
from cachemgr.layer.members import CHUNK, END, UNREAD, WINDOW_LOG, is_read, links_in, tar_size
from cachemgr.layer.reading import Placer, unpack, verify, verify_bytes
from cachemgr.layer.writing import LEVEL, Sink, Source, UnitError, pack

__all__ = [
    "CHUNK",
    "END",
    "LEVEL",
    "UNREAD",
    "WINDOW_LOG",
    "Placer",
    "Sink",
    "Source",
    "UnitError",
    "is_read",
    "links_in",
    "open_quietly",
    "pack",
    "read_file",
    "tar_size",
    "unpack",
    "verify",
    "verify_bytes",
]
