"""Starts of a real vLLM, each with what it took: bare, under `cachemgr run`, with the plugin alone.

    python benchmarks/starts.py --model DIR --store DIR [--out DIR] [--python PYTHON] [--bench] STEP...

A STEP is KIND:NAME[:FLAG,FLAG...]. KIND is `bare`, `run` or `plug` (a plain start with CACHEMGR_ENABLE=1; cachemgr must
be installed beside vLLM). Starts of one NAME share a HOME and cache root: the second of a name starts in place, and a
`run` or `plug` of a new name restores from the store. By default `vllm run-batch` answers two prompts greedily and the
answers are compared with those of the first step; `--picture` asks about one as well, for which some engines compile
their encoder at last; `--bench` takes `vllm bench latency`, which builds the engine in its own process. To measure
another machine, carry the store there and use new names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cachemgr.engine_log import EngineLog
from cachemgr.prewarm.exercise import picture

PROMPTS = ("w3 w1 w4", "w9 w2 w6 w5 w30 w31")
DROPPED = frozenset({"TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "cachemgr-starts")
    parser.add_argument(
        "--python", default=sys.executable, help="Python with vLLM, where that is another one than ours"
    )
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--picture", action="store_true", help="a third prompt has a picture: the model must see")
    parser.add_argument("steps", nargs="+", metavar="STEP")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    first: Any = None
    for number, step in enumerate(options.steps):
        kind, name = step.split(":", 2)[:2]  # flags may hold paths
        row = start(options, step, options.out / f"{number:02}-{kind}-{name}.log")
        first = row["answers"] if first is None else first
        row["same_answers"] = row["answers"] == first
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            "step",
            "code",
            "wall",
            "init_engine",
            "new_files",
            "verdict",
            "added",
            "restore_seconds",
            "same_answers",
        )
        print({name: row.get(name) for name in shown}, flush=True)
    return 0


def start(options: argparse.Namespace, step: str, log: Path) -> dict[str, Any]:
    kind, name, *rest = step.split(":", 2)
    home = options.out / "homes" / name
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    answers, report = home / "answers.jsonl", home / "report.json"
    for path in (answers, report):
        path.unlink(missing_ok=True)
    command = engine(options, home, answers, rest[0].split(",") if rest else ["--max-model-len=4096"])
    if kind == "run":
        command = [sys.executable, "-m", "cachemgr", "run", "--report", str(report), "--", *command]
    environ = {key: value for key, value in os.environ.items() if key not in DROPPED}
    environ |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "CACHEMGR_STORE": str(options.store)}
    if kind == "plug":
        environ |= {"CACHEMGR_ENABLE": "1", "CACHEMGR_REPORT": str(report)}
    before = files_below(home)
    began = time.monotonic()
    with log.open("wb") as file:
        done = subprocess.run(command, env=environ, cwd=home, stdout=file, stderr=subprocess.STDOUT, check=False)
    seconds = time.monotonic() - began
    reader = EngineLog(0.0)
    reader.feed(log.read_bytes(), 0.0)
    seen = reader.seen()
    told = {} if kind == "bare" else told_by(report)
    return {
        "step": step,
        "code": done.returncode,
        "wall": round(seconds, 1),
        "init_engine": seen.phases.get("init_engine"),
        "new_files": len(files_below(home) - before),
        "phases": {**seen.phases, **told.get("phases", {})},
        "entries": [(entry.entry, entry.verdict) for entry in seen.aot_entries],
        "graph_mode": seen.graph_mode,
        "answers": answers_in(answers),
        **{
            name: told.get(name)
            for name in ("result", "verdict", "added", "restored_files", "restore_seconds", "reasons")
        },
    }


def engine(options: argparse.Namespace, home: Path, answers: Path, flags: list[str]) -> list[str]:
    words = [options.python, "-m", "vllm.entrypoints.cli.main"]
    if options.bench:
        words += ["bench", "latency", "--input-len=8", "--output-len=8", "--batch-size=1", "--num-iters=1"]
        words += ["--num-iters-warmup=1"]
    else:
        batch = home / "batch.jsonl"
        requests = [request(prompt, prompt) for prompt in PROMPTS]
        if options.picture:
            requests.append(request("picture", picture()))
        batch.write_text("".join(json.dumps(each) + "\n" for each in requests))
        words += ["run-batch", "-i", str(batch), "-o", str(answers), "--served-model-name=m"]
    return [*words, "--model", str(options.model), "--load-format=dummy", *flags]


def request(name: str, content: object) -> dict[str, object]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def answers_in(path: Path) -> list[Any] | None:
    """Token ids and log probabilities of each answer."""
    if not path.exists():
        return None
    found = []
    for line in path.read_text().splitlines():
        choice = json.loads(line)["response"]["body"]["choices"][0]
        found.append([choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]])
    return found


def told_by(report: Path) -> dict[str, Any]:
    """The report of a start that has ended; the plugin's child finishes it a little later than the engine."""
    for _ in range(60):
        if report.exists() and time.time() - report.stat().st_mtime > 3:
            return dict(json.loads(report.read_text()))
        time.sleep(0.5)
    return {}


def files_below(home: Path) -> set[str]:
    """Cache files of a HOME, by path."""
    roots = (home / ".cache", home / ".triton", home / "tmp")
    return {str(path) for root in roots for path in root.rglob("*") if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
