"""Credentials in every variable, flag and URL that can carry one: none is found again in a store, a home, a report, on
a terminal, or in the arguments of a process that we start.
"""

import json
import os
import re
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.engines import Engines
from tests.machines import Fleet, Machine

pytestmark = pytest.mark.slow


def _unpacked_rows(path: Path) -> bytes:
    """What the compressed columns of a catalogue hold."""
    with closing(sqlite3.connect(path)) as connection:
        rows = [*connection.execute("SELECT record FROM launch"), *connection.execute("SELECT factors FROM factor_set")]
    assert rows, "there is something to look into"
    return b"".join(zstandard.ZstdDecompressor().decompress(data) for (data,) in rows)


class Secrets:
    """Words that nobody else uses, each with the place that it was put into."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}

    def __call__(self, place: str) -> str:
        word = f"Zq{len(self.places):03}hunter2Xv"
        self.places[word] = place
        return word

    def in_text(self, text: str, where: str) -> list[str]:
        """The places whose secret is in a text."""
        return [f"{place} is told in {where}" for word, place in self.places.items() if word in text]

    def below(self, root: Path) -> list[str]:
        """The places whose secret is in a file, in its name, or in what it unpacks to."""
        found = []
        for path in sorted(root.rglob("*")):
            data = path.read_bytes() if path.is_file() else b""
            if path.suffix == ".zst":
                data += zstandard.ZstdDecompressor().decompressobj().decompress(data)
            if path.name == "catalogue.db":
                data += _unpacked_rows(path)
            text = f"{path}\n" + data.decode("utf-8", "replace")
            found += self.in_text(text, str(path.relative_to(root)))
        return found


def variables(secret: Secrets) -> dict[str, str]:
    """What people have in their environments, and what they should not."""
    plain = re.findall(
        r"\w+",
        """
        HF_TOKEN HUGGING_FACE_HUB_TOKEN VLLM_API_KEY OPENAI_API_KEY WANDB_API_KEY AWS_SECRET_ACCESS_KEY
        AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN AZURE_CLIENT_SECRET GITHUB_TOKEN PGPASSWORD DB_PASSWD TORCH_AUTH
        VLLM_AUTH_BEARER TORCHINDUCTOR_CREDENTIALS VLLM_PRIVATE_KEY VLLM_UNKNOWN_NEW_THING VLLM_S3_SECRET
        TORCHINDUCTOR_UNKNOWN_NEW_THING TORCH_UNKNOWN_NEW_THING PYTORCH_UNKNOWN TRITON_UNKNOWN SSH_PASSPHRASE
        """,
    )
    urls = ["HTTP_PROXY", "PIP_INDEX_URL", "VLLM_TRACING_URL", "TORCHINDUCTOR_REMOTE_URL", "HF_ENDPOINT", "REDIS_URL"]
    return {
        **{name: secret(f"${name}") for name in plain},
        **{name: f"https://user:{secret(f'${name}')}@host.example/x" for name in urls},
    }


def options(secret: Secrets) -> list[str]:
    """Words of a program's command line."""
    return [
        "--token", secret("--token VALUE"),
        f"--api-key={secret('--api-key=VALUE')}",
        "--db-password", secret("--db-password VALUE"),
        f"--url=postgres://user:{secret('a URL with a password')}@db/x",
        f"s3://{secret('a URL with a user')}:x@bucket/key",
        f"https://host/x?X-Amz-Signature={secret('a signed URL')}&y=1",
        f"https://host/x?access_token={secret('a URL with a token')}",
        "--header", f"Authorization: Bearer {secret('a header')}",
        f"--extra={json.dumps({'password': secret('JSON'), 'b': [{'auth_token': secret('deep JSON')}]})}",
        "--config", json.dumps({"api_key": secret("JSON in a word of its own")}),
        f"API_KEY={secret('an assignment')}",
        f"hf_{secret('a token of Hugging Face')}abcdefghijklmnopqr",
    ]  # fmt: skip


class _Watching:
    """The command lines of every process below this one while something runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._others = set(Path("/proc").glob("[0-9]*"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Watching":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            for process in set(Path("/proc").glob("[0-9]*")) - self._others:
                try:
                    self.seen.add((process / "cmdline").read_bytes().decode("utf-8", "replace"))
                except OSError:
                    continue
            time.sleep(0.02)  # none of ours is over sooner


def _leaks(machine: Machine, command: tuple[str, ...], secret: Secrets) -> list[str]:
    """Run a command cold, look at what there is, and run it again; where secrets are found again."""
    with _Watching() as watching:
        first = machine.run(*command)
        said = {"ls": machine.cachemgr("ls", "--json").stdout, "report": json.dumps(first)}
        said["show"] = machine.cachemgr("show", first["key"], "--files").stdout
        said["show --json"] = machine.cachemgr("show", first["key"], "--json").stdout
        said["config"] = machine.cachemgr("config", "show").stdout
        said["near"] = _told(machine.cachemgr("lookup", "--", *command, "--another=1", code=1))
        said |= _explained(machine, command, first["key"], secret)
        second = machine.run(*command)
    assert (first["verdict"], second["result"]) == ("cold", "exact")
    ours = "\n".join(line for line in watching.seen if command[-1] not in line)
    found = secret.in_text(ours, "arguments of a process")
    for where, text in {**said, "second": json.dumps(second)}.items():
        found += secret.in_text(text, where)
    return sorted({*found, *secret.below(machine.store), *secret.below(machine.home), *secret.below(machine.tmp)})


def _explained(machine: Machine, command: tuple[str, ...], key: str, secret: Secrets) -> dict[str, str]:
    """What the commands about the catalogue say, also when its database cannot be used."""
    said = {}
    asked: tuple[str, ...]
    for asked in (("why",), ("why", "--json"), ("stats", "--json", "--by", "model"), ("reindex",)):
        said[" ".join(asked)] = _told(machine.cachemgr(*asked))
    for name in ("why", "lint", "diff"):
        asked = (*((key,) if name == "diff" else ()), "--", *command, "--another=1")
        said[f"{name} -- CMD"] = _told(machine.cachemgr(name, *asked, code=None))
        said[f"{name} --json -- CMD"] = _told(machine.cachemgr(name, "--json", *asked, code=None))
    password = secret("a database's password")
    lost = f"postgresql://user:{password}@127.0.0.1:1/x?sslpassword={password}"
    for words in (("stats",), ("ls",), ("config", "show"), ("config", "show", "--json"), ("doctor",)):
        done = machine.cachemgr(*words, code=None, CACHEMGR_DATABASE_URL=lost)
        said[f"{' '.join(words)} without a server"] = _told(done)
    wrong = f"mysql://user:{password}@host/x"
    said["no database"] = _told(machine.cachemgr("ls", code=2, CACHEMGR_DATABASE_URL=wrong))
    return said


def _told(done: Any) -> str:
    return f"{done.stdout}{done.stderr}"


def test_secrets_of_a_program_are_nowhere(tmp_path: Path) -> None:
    secret = Secrets()
    fleet = Fleet(tmp_path)
    machine = fleet.machine("one", **variables(secret))
    (tmp_path / "quiet.py").write_text(
        "import os\npath = os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/qa'\n"
        "os.makedirs(path, exist_ok=True)\nopen(path + '/x.cpp', 'a+').write('')\n"
        "file = open(path + '/y.cpp', 'a+')\nfile.seek(0)\nfile.read() or file.write('int x;')\n"
    )
    command = (fleet.command()[0], str(tmp_path / "quiet.py"), *options(secret), "--last-word")
    leaks = _leaks(machine, command, secret)
    assert leaks == [], "\n".join(leaks)


def test_secrets_of_a_server_are_nowhere(tmp_path: Path) -> None:
    secret = Secrets()
    engines = Engines.install(tmp_path)
    connector = {"kv_connector": "x", "kv_connector_extra_config": {"password": secret("a connector")}}
    given = [
        "--api-key", secret("--api-key VALUE"),
        f"--hf-token={secret('--hf-token=VALUE')}",
        f"--kv-transfer-config={json.dumps(connector)}",
        f"--additional-config={json.dumps({'x': {'auth_token': secret('an additional config')}})}",
        f"--hf-overrides={json.dumps({'token': secret('an override')})}",
        f"--download-dir=https://user:{secret('a place to download to')}@host/x",
        f"--tokenizer=https://user:{secret('a tokenizer')}@host/x",
        f"--unknown-new-flag=https://user:{secret('an unknown flag')}@host/x",
        "--max-model-len=8192",
    ]  # fmt: skip
    machine = engines.machine("one", **variables(secret), VLLM_CACHE_ROOT=str(tmp_path / "root"))
    leaks = _leaks(machine, engines.serve(*given), secret)
    assert leaks == [], "\n".join(leaks)
    assert os.path.isdir(tmp_path / "root")


@pytest.mark.parametrize(("pattern", "kept"), [("MODEL", False), ("acme/*,mo?el", False), ("models", True)])
def test_nothing_about_a_model_that_is_never_published_reaches_the_store(
    tmp_path: Path, pattern: str, kept: bool
) -> None:
    engines = Engines.install(tmp_path)
    machine = engines.machine("one", CACHEMGR_NEVER_PUBLISH=pattern)
    report = machine.run(*engines.serve("--max-model-len=8192"))
    assert (report["published"] is not None) is kept
    names = sorted(path.name for path in machine.store.rglob("*") if path.is_file())
    assert (names == ["CACHEDIR.TAG", "layout.json"]) is not kept
    if not kept:
        assert f"`never_publish` has {pattern.rsplit(',', maxsplit=1)[-1]}" in report["stderr"]
    again = machine.run(*engines.serve("--max-model-len=8192"))
    assert sum(again["added"].values()) == 0, "the live directory of this machine serves all the same"
