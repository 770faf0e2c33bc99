"""`doctor`: checks the requirements of an embedding host in this environment, one by one. Changes nothing.

Every library is tried in a child process: one that raises, prints or crashes is a finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import doctor_build
from .child import run_child
from .paths import get_cmake_dir

_PACKAGES = ("xllm-metadata", "xllm-attention", "xllm-graph", "xllm-models", "xllm-executor")
_TORCH = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.__file__, torch.compiled_with_cxx11_abi(), names]))
"""
_BACKENDS = """
import json
from xllm_attention import available_backends, unavailable_backends
print(json.dumps([list(available_backends()), dict(unavailable_backends())]))
"""
_TORCH_LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement; `ok` is False when embedding would fail."""

    name: str
    ok: bool
    finding: str
    remedy: str = ""  # what to install; empty when ok


def examine() -> list[Check]:
    """Runs every check in the environment of the running interpreter."""
    checks = [_python(), _packages(), *_torch(), _backends(), _headers()]
    for name, check in doctor_build.CHECKS.items():
        try:
            checks.append(Check(name=name, ok=True, finding=check()))
        except doctor_build.MissingError as missing:
            checks.append(Check(name=name, ok=False, finding=missing.finding, remedy=missing.remedy))
    return checks


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    finding = f"{platform.python_version()} at {sys.executable}; 3.11 and 3.12 are served"
    return Check(name="python", ok=ok, finding=finding, remedy="" if ok else "install Python 3.11 or 3.12")


def _packages() -> Check:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    versions = set(found.values())
    if len(versions) == 1 and "missing" not in versions:
        return Check(name="packages", ok=True, finding=f"all {versions.pop()}")
    finding = ", ".join(f"{name} {version}" for name, version in found.items())
    return Check(name="packages", ok=False, finding=finding, remedy="install one version of all five packages")


def _torch() -> list[Check]:
    remedy = "pip install --force-reinstall 'torch>=2.11'"
    found, fault = _run_python(_TORCH)
    if fault:
        return [Check(name="torch", ok=False, finding=f"import fails: {fault}", remedy=remedy)]
    version, file, has_new_abi, devices = found
    folder = Path(file).parent
    libraries = [folder / "lib" / f"lib{name}.so" for name in _TORCH_LIBRARIES]
    missing = [str(path) for path in (*libraries, folder / "include/torch/csrc/api/include") if not path.exists()]
    finding = f"{version} at {folder}; 2.11 and later are served"
    if missing:
        finding += f"; missing: {', '.join(missing)}"
    if not has_new_abi:
        finding += "; built with the old libstdc++ ABI"
    ok = not missing and has_new_abi and tuple(int(part) for part in version.split(".")[:2]) >= (2, 11)
    return [
        Check(name="torch", ok=ok, finding=finding, remedy="" if ok else remedy),
        Check(name="devices", ok=True, finding=", ".join(["cpu", *devices])),
    ]


def _backends() -> Check:
    found, fault = _run_python(_BACKENDS)
    remedy = "correct what the torch and packages checks name"
    if fault:
        return Check(name="attention backends", ok=False, finding=f"import fails: {fault}", remedy=remedy)
    available, unavailable = found
    finding = ", ".join(available)
    finding += "".join(f"; not {name}: {reason}" for name, reason in unavailable.items())
    return Check(name="attention backends", ok=bool(available), finding=finding, remedy="" if available else remedy)


def _run_python(source: str) -> tuple[Any, str]:
    """(what the program printed as JSON in its last line, fault) of a new interpreter."""
    output, fault = run_child([sys.executable, "-c", source])
    if fault:
        return None, fault
    try:
        return json.loads(output.splitlines()[-1]), ""
    except (IndexError, ValueError):
        return None, "the process ended early"


def _headers() -> Check:
    cmake_dir = Path(get_cmake_dir())
    files = [
        cmake_dir / "xllm_executor-config.cmake",
        cmake_dir.parent / "streams.py",  # the CMake package embeds its text
        cmake_dir.parent / "bridge/include/xllm_executor/executor.h",
        cmake_dir.parent / "bridge/src/executor.cpp",
    ]
    remedy = "pip install --force-reinstall xllm-executor"
    spec = importlib.util.find_spec("xllm_metadata")  # does not import it: that needs torch
    if spec is None or spec.origin is None:
        return Check(name="C++ side", ok=False, finding="missing: xllm_metadata", remedy=remedy)
    metadata = Path(spec.origin).parent
    version_header = metadata / "include/xllm_metadata/version.h"
    files += [
        metadata / "cmake/xllm_metadata-config.cmake",
        metadata / "include/xllm_metadata/attention_metadata.h",
        version_header,
    ]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        return Check(name="C++ side", ok=False, finding=f"missing: {', '.join(missing)}", remedy=remedy)
    numbers = dict(re.findall(r"kContractVersion(Major|Minor) = (\d+);", version_header.read_text(errors="replace")))
    if len(numbers) != 2:
        return Check(name="C++ side", ok=False, finding=f"no contract version in {version_header}", remedy=remedy)
    finding = f"contract {numbers['Major']}.{numbers['Minor']}, CMake package at {cmake_dir}"
    return Check(name="C++ side", ok=True, finding=finding)
