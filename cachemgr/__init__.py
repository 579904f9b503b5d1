"""cachemgr makes an inference engine's second start fast anywhere.

It captures what a start of vLLM or of a `torch.compile` program compiled, keeps it in a store, and puts it back on the
next machine before the engine looks. README.md has the map of the house.
"""

__version__ = "0.1.0"
