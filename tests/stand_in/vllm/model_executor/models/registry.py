"""The child that imports a model class."""


def _run() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


if __name__ == "__main__":
    _run()
