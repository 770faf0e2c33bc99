"""Runs the command line for `python -m xllm_text`."""

from __future__ import annotations

import sys


def run() -> int:
    try:
        from .cli import main  # takes long enough to be interrupted

        return main(sys.argv[1:])
    except KeyboardInterrupt:  # before main handles signals
        return 130


sys.exit(run())
