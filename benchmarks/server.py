"""What the service does under load: look-ups and reports of a fleet, against a store of many artifacts and launches.

    python benchmarks/server.py [--artifacts N] [--launches N] [--rate N] [--seconds N] [--cpus LIST] [--json FILE]

A real `cachemgr serve` on SQLite and a directory; requests come at a fixed rate whatever the answers take (an open
loop), half of them look-ups (two of three exact, one near) and half of them reports of one launch, over kept-alive
connections. Told are the latencies from when a request was due, the server's memory before and after, its CPU seconds
per request, and the bytes that a launch takes in the store and in the database.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from catalogue import _factors, _launch, fill
from measure import table

from cachemgr.capture import encode_launch
from cachemgr.clock import written
from cachemgr.key import Factor, derive
from cachemgr.store.local import LocalStore

_CONNECTIONS = 32
_READY_SECONDS = 600.0


class Measured(msgspec.Struct):
    """Latencies in seconds, by kind of request; memory in bytes."""

    latencies: dict[str, list[float]]
    failures: list[str]
    memory_before: int
    memory_after: int
    cpu_seconds: float
    store_bytes: int
    database_bytes: int


def _request(path: str, body: bytes, token: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _bodies(count: int, artifacts: int, token: str) -> list[tuple[str, bytes]]:
    found = []
    for number in range(count):
        if number % 2:
            launch = msgspec.structs.replace(
                _launch(number, derive(_factors(number % artifacts)), "load"),
                launch=f"load-{os.getpid()}-{number}",
                started=written(time.time()),
            )
            body = b'{"launches":[' + encode_launch(launch) + b"]}"
            found.append(("report", _request("/v1/launches", body, token)))
        else:
            factors: tuple[Factor, ...] = _factors(number * 7919 % artifacts)
            kind = "look-up, exact"
            if number % 3 == 0:
                factors, kind = (*factors, Factor("flags.other", str(number), "match")), "look-up, near"
            body = msgspec.json.encode({"factors": factors})
            found.append((kind, _request("/v1/lookup", body, token)))
    return found


async def _load(port: int, requests: list[tuple[str, bytes]], rate: float) -> tuple[dict[str, list[float]], list[str]]:
    """Each connection takes the next request that is due."""
    latencies: dict[str, list[float]] = {}
    failures: list[str] = []
    begun = time.perf_counter() + 0.5
    pending = iter(enumerate(requests))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number, (kind, request) in pending:
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1]) if length else 0)
            latencies.setdefault(kind, []).append(time.perf_counter() - due)
            if not head.startswith("HTTP/1.1 200"):
                failures.append(f"{kind}: {head.splitlines()[0]} {body[:200]!r}")
        writer.close()

    await asyncio.gather(*(connection() for _number in range(_CONNECTIONS)))
    return latencies, failures


def measured(artifacts: int, launches: int, rate: float, seconds: float, cpus: str) -> Measured:
    """Fill a store, serve it, and ask."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        fill(LocalStore(home / "store"), artifacts, launches)
        store_bytes = sum(path.stat().st_size for path in (home / "store/launches").rglob("*") if path.is_file())
        environ = {**os.environ, "HOME": place, "CACHEMGR_HOME": str(home), "CACHEMGR_TRUST": "off"}
        ours = [sys.executable, "-m", "cachemgr"]
        made = subprocess.run(
            [*ours, "token", "create", "load", "--role", "report"],
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        )
        pinned = ["taskset", "-c", cpus] if cpus else []
        log = Path(place) / "log"
        with log.open("w") as stderr:
            server = subprocess.Popen([*pinned, *ours, "serve", "--port", "0"], env=environ, stderr=stderr)
        try:
            port = _ready(log, server)
            database_bytes = (home / "catalogue.db").stat().st_size
            requests = _bodies(int(rate * seconds), artifacts, made.stdout.strip())
            asyncio.run(_load(port, requests[: int(rate)], rate))  # what is loaded once
            before, cpu = _memory(server.pid), _cpu(server.pid)
            latencies, failures = asyncio.run(_load(port, requests[int(rate) :], rate))
            return Measured(
                latencies, failures, before, _memory(server.pid), _cpu(server.pid) - cpu, store_bytes, database_bytes
            )
        finally:
            server.terminate()
            server.wait()


def _ready(log: Path, server: "subprocess.Popen[bytes]") -> int:
    import http.client

    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        found = re.search(r"http://\S+:(\d+)", log.read_text())
        if found:
            asked = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
            asked.request("GET", "/readyz")
            if asked.getresponse().status == 200:
                return int(found[1])
        time.sleep(0.2)
    raise SystemExit(f"the server is not ready: {log.read_text()}")


def _memory(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "a process has memory"
    return int(found[1]) * 1024


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(values: list[float], share: float) -> str:
    ordered = sorted(values)
    return f"{1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifacts", type=int, default=10_000)
    parser.add_argument("--launches", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cpus", default="", help="the server's, as `taskset -c` takes them")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measured(given.artifacts, given.launches, given.rate, given.seconds, given.cpus)
    everything = [each for values in found.latencies.values() for each in values]
    rows = [
        (kind, str(len(values)), *(_percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)))
        for kind, values in (*sorted(found.latencies.items()), ("all", everything))
    ]
    print(table(("request", "count", "median, ms", "p95", "p99", "slowest"), rows))
    print(f"failures {len(found.failures)} {found.failures[:3]}")
    print(f"memory {found.memory_before / 1e6:.0f} MB before and {found.memory_after / 1e6:.0f} MB after")
    print(f"CPU {1000 * found.cpu_seconds / len(everything):.2f} ms a request")
    per = given.launches or 1
    print(f"a launch takes {found.store_bytes / per:.0f} bytes of the store, rolled up", end="")
    print(f", and with its share of artifacts {found.database_bytes / per:.0f} of the database")
    if given.json:
        given.json.write_text(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main()
