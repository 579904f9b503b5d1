"""As vLLM's logging: one handler on the logger `vllm`, which hands nothing on."""

import logging
import logging.config
import os
import sys


def configure() -> None:
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "vllm": {
                    "format": "(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] "
                    "%(message)s",
                    "datefmt": "%m-%d %H:%M:%S",
                }
            },
            "handlers": {
                "vllm": {
                    "class": "logging.StreamHandler",
                    "formatter": "vllm",
                    "level": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
                    "stream": sys.stdout,
                }
            },
            "loggers": {
                "vllm": {
                    "handlers": ["vllm"],
                    "level": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
                    "propagate": False,
                }
            },
        }
    )


configure()
