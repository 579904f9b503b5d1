"""The command `vllm`."""

import argparse
import os
import signal
import sys
import tempfile
import time


def main() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    if sys.argv[1:3] == ["bench", "startup"]:
        with tempfile.TemporaryDirectory() as root:
            os.environ["VLLM_CACHE_ROOT"] = root
            print("ANSWER", engine_of(EngineArgs(model=sys.argv[3])).answer, flush=True)
        return
    parser = argparse.ArgumentParser("vllm")
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--speculative-config")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    parser.add_argument("--load-format")
    words = vars(parser.parse_args())
    command = words.pop("command")
    port, host = words.pop("port"), words.pop("host")
    words.pop("load_format")
    core = engine_of(AsyncEngineArgs(**words))
    print("ANSWER", core.answer, flush=True)
    if command == "serve":
        print("INFO:     Application startup complete.", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        if host is not None:
            answer_on(host, port)
        time.sleep(float(os.environ.get("SERVE_SECONDS", "0")))


def answer_on(host, port):
    """A server that has nothing to answer, and says so."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    ThreadingHTTPServer((host, port), Handler).serve_forever()


def engine_of(args):
    from vllm.v1.engine.core import make

    return make(args.create_engine_config())


if __name__ == "__main__":
    main()
