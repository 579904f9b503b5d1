"""The ten-hex directory."""

import os


class CompilerManager:
    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        self.path = os.path.join(cache_dir, "vllm_compile_cache.py")
        self.found = not disable_cache and os.path.exists(self.path)
        if self.found:
            with open(self.path) as file:
                file.read()

    def save_to_file(self) -> None:
        if not self.found:
            with open(self.path, "w") as file:
                file.write("{}\n")
