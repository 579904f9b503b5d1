"""Fetch the Python sources of released vLLM wheels, and nothing else: facts about vLLM are tested against these.

    python scripts/vllm_sources.py DIRECTORY [VERSION...]

makes DIRECTORY/<version>/vllm/**.py, of all versions that `scripts/vllm_facts.py` names if none is given. A wheel is
300 MB of machine code around 15 MB of Python, so its members are read by ranged requests, and each is checked against
its checksum. What lies in DIRECTORY is not fetched again.
"""

import io
import json
import os
import sys
import urllib.request
import zipfile
from pathlib import Path

from vllm_facts import VERSIONS

INDEX = os.environ.get("VLLM_SOURCES_INDEX", "https://pypi.org/simple/vllm/")
SUFFIX = "manylinux_2_28_x86_64.whl"
_AHEAD = 1 << 20
_SECONDS = 60


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory, *versions = sys.argv[1:]
    wanted = [version for version in versions or VERSIONS if not (Path(directory) / version).is_dir()]
    try:
        addresses = released() if wanted else {}
        for version in wanted:
            fetch(addresses[version], Path(directory) / version)
            print(f"vLLM {version}: {directory}/{version}")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        print(f"vLLM's sources cannot be fetched from {INDEX}: {error!r}", file=sys.stderr)
        return 1
    return 0


def released() -> dict[str, str]:
    """The address of the x86_64 wheel of every version, by PEP 691."""
    request = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        files = json.load(answer)["files"]
    return {file["filename"].split("-")[1]: file["url"] for file in files if file["filename"].endswith(SUFFIX)}


def fetch(address: str, target: Path) -> None:
    """Whole or not at all."""
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    with zipfile.ZipFile(io.BufferedReader(Remote(address), _AHEAD)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".py")]
        for member in sorted(members, key=lambda member: member.header_offset):
            archive.extract(member, aside)
    aside.rename(target)


class Remote(io.RawIOBase):
    """A file on a server that answers ranged requests."""

    def __init__(self, address: str) -> None:
        self._address, self._at = address, 0
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        wanted = f"bytes={self._at}-{self._at + count - 1}"
        request = urllib.request.Request(self._address, headers={"Range": wanted})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


if __name__ == "__main__":
    sys.exit(main())
