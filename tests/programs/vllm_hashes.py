"""Asked by tests/test_vllm_real.py, with the interpreter of a real vLLM: what does it parse, and what does it hash?

Reads a JSON list of [words of `vllm serve` or null, variables] from the standard input, and writes a list of answers in
the same order: {"config": …, "environment": …, "carries": …, "asked": …} or {"error": …}. With `options` as its
argument it lists the parser's options instead, with the version: name, spellings, class of the action, nargs and
choices.
"""

import argparse
import json
import os
import sys

import cloudpickle

sys.path.append(os.environ["CACHEMGR_ROOT"])  # for the shim, which needs nothing that is not here
import vllm
from vllm import envs
from vllm.config.utils import hash_factors
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cachemgr.plugin.arguments import described


def parser():
    made = FlexibleArgumentParser(prog="vllm")
    return made, ServeSubcommand().subparser_init(made.add_subparsers(dest="subparser"))


def answer(words, variables):
    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        if words is None:
            return {"environment": hash_factors(envs.compile_factors())}
        args = parser()[0].parse_args(["serve", *words])
        if args.model_tag is not None:
            args.model = args.model_tag
        engine_args = AsyncEngineArgs.from_cli_args(args)
        asked = described(engine_args)
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=args.headless)
        hashed = config.compute_hash()
        return {
            "config": hashed,
            "environment": hash_factors(envs.compile_factors()),
            "carries": carries(config, hashed),
            "asked": asked,
        }
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever vLLM refuses is an answer
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        os.environ.clear()
        os.environ.update(kept)


def carries(config, hashed):
    """Whether an attribute of ours reaches another machine with a configuration, and no hash."""
    vars(config)["_cachemgr_launch"] = "left"
    there = cloudpickle.loads(cloudpickle.dumps(config))
    return vars(there).get("_cachemgr_launch") == "left" and there.compute_hash() == config.compute_hash() == hashed


def options():
    found = []
    for action in parser()[1]._actions:
        if not action.option_strings or isinstance(action, argparse._HelpAction):
            continue
        spelled = next(word for word in action.option_strings if word.startswith("--"))
        choices = [str(choice) for choice in action.choices or () if choice is not None]
        found.append([spelled, list(action.option_strings), type(action).__name__, str(action.nargs), choices])
    return {"version": vllm.__version__, "options": found}


if __name__ == "__main__":
    real = os.dup(1)
    os.dup2(2, 1)
    result = options() if sys.argv[1:] == ["options"] else [answer(*each) for each in json.load(sys.stdin)]
    os.write(real, json.dumps(result).encode())
