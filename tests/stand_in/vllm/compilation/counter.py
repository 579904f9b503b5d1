"""Counts, as vLLM's own."""

from dataclasses import dataclass


@dataclass
class CompilationCounter:
    num_aot_compiles: int = 0
    num_aot_artifacts_loaded: int = 0


compilation_counter = CompilationCounter()
