"""A stand-in for vLLM that has the functions which our plugin hooks, under their names, and the processes of the real
one: a front process, an engine core and workers that are started anew and load plugins themselves.

It compiles nothing. It keeps an AOT entry (picked by a hash that is blind to speculation), a ten-hex directory with its
index, and kernels in Triton's directory, and says what vLLM says. `test_vllm_plugin.py` has the real one.
"""


def __getattr__(name: str):
    if name == "LLM":
        from vllm.entrypoints.llm import LLM

        return LLM
    raise AttributeError(name)
