"""A stand-in for vLLM: a `vllm` command that keeps the caches that vLLM keeps, and says what vLLM says.

RANKS says which ranks run here.

It picks its AOT entry by a hash that is blind to the number of speculative tokens, as the real one is, dies of a cut
`model`, and says so in a traceback. It stands in where a real engine would cost minutes; `test_vllm_e2e.py` has the
real one.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.machines import Machine, install_stand_in

ENGINE = '''\
import base64, hashlib, json, os, signal, sys, time, traceback

root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ["HOME"], ".cache"), "vllm"
)
words = sys.argv[1:]
model = words[1]
options = dict(word.partition("=")[::2] for word in words[2:] if word.startswith("-"))
ranks = os.environ.get("RANKS", "0").split(",")
behaviour = set(filter(None, os.environ.get("STAND_IN", "").split(",")))


def say(source, text):
    print(f"(EngineCore_DP0 pid={os.getpid()}) INFO 11-29 17:17:41 [{source}:1] {text}", flush=True)


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + f".{os.getpid()}.tmp", "wb") as file:
        file.write(data)
    os.replace(path + f".{os.getpid()}.tmp", path)


def pickle_of(text):
    return b"\\x80\\x04" + text.encode() + b"|" + b"x" * 3000 + b"."


def kernel(name):
    directory = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ["HOME"], ".triton", "cache")
    folder = os.path.join(directory, hashlib.sha256(name.encode()).hexdigest().upper()[:52])
    if os.path.exists(f"{folder}/{name}.source"):
        return open(f"{folder}/{name}.source", "rb").read()
    write(f"{folder}/{name}.source", b"source of " + name.encode())
    print("compiled kernel", name, file=sys.stderr)


def unpack(name, block=64):
    """As vLLM up to 0.31 writes parts of an artifact out at every start; `block` is the winner of a tuning."""
    data = b"def call(): pass"
    folded = base64.b32encode(hashlib.sha256(data).digest())[:51].decode().lower()
    folder = f"{root}/torch_compile_cache/torch_aot_compile/{name}/inductor_cache/{folded[:2]}"
    write(f"{folder}/c{folded}.py", data)
    winner = {"XBLOCK": block, "time_taken_ms": time.monotonic_ns() % 1000}
    write(f"{folder}/{'0' * 64}.best_config", json.dumps(winner).encode())


def aot():
    blind = {"--speculative-config", "--node-rank", "--nnodes", "--load-format", "--host", "--port"}
    hashed = {name: value for name, value in options.items() if name not in blind}
    name = hashlib.sha256(json.dumps([model, hashed], sort_keys=True).encode()).hexdigest()
    tokens = options.get("--speculative-config", "none")
    path, *others = [f"{root}/torch_compile_cache/torch_aot_compile/{name}/rank_{rank}_0/model" for rank in ranks]
    os.makedirs(f"{root}/torch_compile_cache/torch_aot_compile/{name}/inductor_cache", exist_ok=True)
    if all(map(os.path.exists, [path, *others])):
        data, *_rest = [open(each, "rb").read() for each in [path, *others]]
        if "reject" in behaviour:
            failure = f"Compiling model again due to a load failure from {path}, reason: pickle data was truncated"
            print("WARNING 11-29 17:17:41 [decorators.py:325]", failure, flush=True)
        elif "die" in behaviour:
            try:
                raise RuntimeError(f"cannot load {path}")
            except RuntimeError:
                traceback.print_exc()
            sys.exit(1)
        elif "segfault" in behaviour:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif "core-segfault" in behaviour:
            print("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -11}")
            sys.exit(1)
        else:
            say("decorators.py", f"Directly load AOT compilation from path {path}")
            if "unpack" in behaviour:
                unpack(name, 128 if "retune" in behaviour else 64)
            return data
    if "no-compile" in behaviour:
        return b""
    time.sleep(float(os.environ.get("COMPILE_SECONDS", "0")))
    data = pickle_of(f"graph with {tokens}")
    for each in [path, *others]:
        write(each, data)
    unpack(name)
    say("decorators.py", f"saved AOT compiled function to {path}")
    return data


info = f"{root}/modelinfos/vllm-model.json"
if not os.path.exists(info):
    write(info, b"{}")
else:
    open(info, "rb").read()
say("core.py", f"Initializing a V1 LLM engine (v0.32.0) with config: model={model!r}")
if "elsewhere" in behaviour:
    root = os.environ["HOME"] + "/elsewhere"
time.sleep(float(os.environ.get("LOOK_SECONDS", "0")))
data = aot() if "--enforce-eager" not in options else b""
if "quit" in behaviour:
    sys.exit(0)
while os.environ.get("WARMS_UP_UNTIL") and not os.path.exists(os.environ["WARMS_UP_UNTIL"]):
    time.sleep(0.1)
kernel("rms_norm")
kernel("attention_" + options.get("--max-model-len", "0"))
print(data[2:].partition(b"|")[0].decode(), file=sys.stderr)
say("core.py", "init engine (profile, create kv cache, warmup model) took 1.50 s (compilation: 0.50 s)")
def serve(port):
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    asked_for_json = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            dead = "dies-of-json" in behaviour and asked_for_json
            self.answer({"data": [{"id": "m", "max_model_len": 64}]}, 503 if dead else 200)

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "/chat/" in self.path:
                return self.answer({"error": {"message": "no template"}}, 400)
            kernel("sampler_" + ("sampled" if asked.get("temperature") else "greedy"))
            if "response_format" in asked and behaviour & {"no-json", "dies-of-json"}:
                asked_for_json.append(asked)
                return self.answer({"error": {"message": "cannot spell JSON"}}, 500)
            if "noise" in behaviour:
                kernel(f"noise_{time.monotonic_ns()}")
            self.answer({}, 500 if "fail" in behaviour else 200)

        def answer(self, body, status=200):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if words[0] == "serve":
    print("INFO:     Application startup complete.", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if "--port" in words:
        serve(int(words[words.index("--port") + 1]))
    time.sleep(float(os.environ.get("SERVE_SECONDS", "0")))
'''


def install_vllm(directory: Path, version: str, program: str, package: Path | None = None) -> dict[str, str]:
    """A vLLM by all that factors look at, whose command is `program`, and a model; the variables that it runs with.
    `package` is what it consists of, if it is to be imported."""
    variables = install_stand_in(directory)
    site = Path(variables["PYTHONPATH"])
    if package is None:
        (site / "vllm").mkdir()
        (site / "vllm" / "__init__.py").write_text("")
    else:
        shutil.copytree(package, site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "RECORD").write_text(f"vllm/__init__.py,sha256={version},0\n")
    command = directory / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(program)
    command.chmod(0o755)
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return variables


@dataclass(frozen=True)
class Engines:
    """Machines with a stand-in vLLM that share a store."""

    directory: Path
    variables: dict[str, str]

    @classmethod
    def install(cls, directory: Path, version: str = "0.32.0") -> "Engines":
        return cls(directory, install_vllm(directory, version, f"#!{sys.executable}\n{ENGINE}"))

    @property
    def model(self) -> str:
        return str(self.directory / "model")

    def machine(self, name: str, **variables: str) -> Machine:
        return Machine(self.directory / name, self.directory / "store", {**self.variables, **variables})

    def serve(self, *options: str) -> tuple[str, ...]:
        return (str(self.directory / "bin" / "vllm"), "serve", self.model, *options)
