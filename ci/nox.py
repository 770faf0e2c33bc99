"""Runs nox from its own virtual environment, so that a fresh machine needs only Python."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ("nox==2026.10.20", "virtualenv==21.15.11", "tqdm==4.70.1")


def main() -> None:
    """Makes the environment when it is missing or its requirements have changed, then replaces this process by nox."""
    folder = ROOT / ".nox" / "bootstrap"
    python = folder / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = "\n".join((sys.version, *REQUIREMENTS))
    if not stamp.is_file() or stamp.read_text() != wanted:
        print("setting up nox ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", "nox", *sys.argv[1:]])


if __name__ == "__main__":
    main()
