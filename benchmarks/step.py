"""Cost of calling one step from C++ into Python, as a ratio to a plain pybind11 call of the same run.

    python benchmarks/step.py PROGRAM [--device cuda] [--out FILE.json]

PROGRAM is the built integration/bridge/step_benchmark; its source describes the timed calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import results


def main() -> None:
    """Runs the program and prints a table; writes the numbers to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("--device", default="cpu", help="device of a step's tensors")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    numbers_of = (arguments.steps, arguments.repeats, arguments.device)
    command = [str(arguments.program), sys.executable, *map(str, numbers_of)]
    numbers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print("| call | us | ratio |\n| --- | --- | --- |")
    print(f"| pybind11 call with two new tensors | {numbers['baseline_us']:.2f} | 1 |")
    for kind in ("decode", "mixed"):
        microseconds, ratio = numbers[f"{kind}_step_us"], numbers[f"{kind}_ratio"]
        print(f"| {kind} step, every core field read | {microseconds:.2f} | {ratio:.2f} |")
    if arguments.out is not None:
        results.write(arguments.out, benchmark="step", device=arguments.device, results=numbers)


if __name__ == "__main__":
    main()
