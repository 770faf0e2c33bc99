"""Writes and reads result files: numbers of a benchmark with a stamp of date, device, versions, commit and command.

A result file is one JSON object {"benchmark": name, "stamp": ..., "results": ...}. The files in benchmarks/results/ are
the source of the documentation's tables and plots.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")


def stamp(device: torch.device | str) -> dict[str, Any]:
    """Device, versions, commit (with '+' after it when the tree has changes) and command of this run."""
    device = torch.device(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cuda": torch.version.cuda,
        "commit": _commit(),
        "command": shlex.join(["python", *_relative(sys.argv)]),
    }


def write(path: Path, *, benchmark: str, device: torch.device | str, results: Any) -> None:
    """Writes one result file; the folder is made when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "stamp": stamp(device), "results": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path, benchmark: str) -> dict[str, Any]:
    """Reads a result file. Raises `ValueError` when it is of another benchmark."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("benchmark") != benchmark:
        raise ValueError(f"{path} holds results of {document.get('benchmark')!r}, not of {benchmark!r}")
    return document


def _version(name: str) -> str | None:
    # Of the module in use: a copy elsewhere on the path may have no metadata and hide an installed version.
    loaded = sys.modules.get(name.removesuffix("-python"))
    if (version := getattr(loaded, "__version__", None)) is not None:
        return str(version)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    # A copy of the tree may lack its history, or have another one. XLLM_COMMIT then names the commit.
    if commit := os.environ.get("XLLM_COMMIT"):
        return commit
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _relative(arguments: list[str]) -> list[str]:
    """Arguments without the folders of this machine: paths in the project relative to its root, others by file name."""
    short = []
    for argument in arguments:
        path = Path(argument)
        if "/" in argument and path.resolve().is_relative_to(ROOT):
            argument = str(path.resolve().relative_to(ROOT))
        elif path.is_absolute():
            argument = path.name
        short.append(argument)
    return short
