"""Runs the command line for `python -m xllm_text`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
