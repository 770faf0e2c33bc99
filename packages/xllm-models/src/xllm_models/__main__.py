"""`python -m xllm_models`: the command line of the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .compare import command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m xllm_models")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = commands.add_parser("compare", help="compare a model with HF transformers, module by module")
    command.add_arguments(compare)
    arguments = parser.parse_args(argv)
    try:
        return command.run(arguments, print)
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library not in ("transformers", "matplotlib"):
            raise
        print(f"error: {library} is not installed: pip install 'xllm-models[compare]'", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
