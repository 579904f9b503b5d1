"""Cold on one machine, warm on another: two starts of a real torch.compile program, side by side.

Started by `scripts/quickstart`. The two "machines" are two HOMEs, TMPDIRs and cache roots; what they share is a store.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "tests" / "programs" / "several_graphs.py"
ARGUMENTS = ["48"]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="cachemgr-quickstart-") as directory:
        room = Path(directory)
        cold = start("machine-1", room)
        warm = start("machine-2", room)
        print_side_by_side(cold, warm)
        cachemgr(["ls"], room)
        cachemgr(["show", cold["key"][:12]], room)
    return 0 if warm["verdict"] == "used" and cold["output"] == warm["output"] else 1


def start(machine: str, room: Path) -> dict:
    """Start the program under `cachemgr run` on a machine that has never seen it."""
    home = room / machine
    (home / "tmp").mkdir(parents=True)
    report = home / "report.json"
    words = [sys.executable, str(PROGRAM), *ARGUMENTS]
    print(f"\n{machine}$ cachemgr run -- python {PROGRAM.name} {' '.join(ARGUMENTS)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "cachemgr", "run", "--report", str(report), "--", *words],
        env=environment(room) | {"HOME": str(home), "TMPDIR": str(home / "tmp")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(report.read_text()) | {"output": done.stdout}


def environment(room: Path) -> dict[str, str]:
    """This environment without caches that would make the first start warm."""
    dropped = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    kept = {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("CACHEMGR_")
    }
    return kept | {"CACHEMGR_STORE": str(room / "store")}


def print_side_by_side(cold: dict, warm: dict) -> None:
    rows = [
        ("", "machine-1", "machine-2"),
        ("seconds", f"{cold['phases']['run']:.1f}", f"{warm['phases']['run']:.1f}"),
        ("files restored", str(cold["restored_files"]), str(warm["restored_files"])),
        ("files added", str(sum(cold["added"].values())), str(sum(warm["added"].values()))),
        ("verdict", cold["verdict"], warm["verdict"]),
        ("same output", "", "yes" if cold["output"] == warm["output"] else "NO"),
    ]
    print()
    for name, first, second in rows:
        print(f"{name:<16}{first:>10}{second:>12}")


def cachemgr(words: list[str], room: Path) -> None:
    print(f"\n$ cachemgr {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "cachemgr", *words], env=environment(room), check=True)


if __name__ == "__main__":
    sys.exit(main())
