"""Finish a bill of materials: the wheel itself, with its version, its digest and those of its files.

`sbom.py FILE WHEEL VERSION`; called by `scripts/sbom`.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any


def _hashed(data: bytes) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}]


def finish(document: dict[str, Any], wheel: Path, version: str) -> None:
    """Add what only the wheel knows to the component that the document is about."""
    component = document["metadata"]["component"]
    component["version"] = version
    component["purl"] = f"pkg:pypi/{component['name']}@{version}"
    component["hashes"] = _hashed(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        component["components"] = [
            {"type": "file", "name": name, "hashes": _hashed(archive.read(name))} for name in names
        ]


def main(file: str, wheel: str, version: str) -> None:
    """Rewrite `file`."""
    path = Path(file)
    document = json.loads(path.read_text())
    finish(document, Path(wheel), version)
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    print(
        f"{path}: {len(document['components'])} packages, {len(document['metadata']['component']['components'])} files"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
