"""`doctor`: checks the requirements of an embedding host in this environment, one by one. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from xllm_attention import available_backends, unavailable_backends
from xllm_metadata import CONTRACT_VERSION, get_include

from .paths import get_cmake_dir

_PACKAGES = ("xllm-metadata", "xllm-attention", "xllm-graph", "xllm-models", "xllm-executor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement; `ok` is False when embedding would fail."""

    name: str
    ok: bool
    finding: str


def examine() -> list[Check]:
    """Runs every check in the environment of the running interpreter."""
    return [_python(), _libpython(), _packages(), _torch(), _devices(), _backends(), _headers()]


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Check(
        name="python", ok=ok, finding=f"{platform.python_version()} at {sys.executable}; 3.11 and 3.12 are served"
    )


def _libpython() -> Check:
    library = sysconfig.get_config_var("INSTSONAME") or ""
    folder = sysconfig.get_config_var("LIBDIR") or ""
    shared = ".so" in library or ".dylib" in library
    finding = str(Path(folder) / library) if shared else f"{library or 'none'}: embedding needs a shared libpython"
    return Check(name="libpython", ok=shared, finding=finding)


def _packages() -> Check:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    versions = set(found.values())
    ok = len(versions) == 1 and "missing" not in versions
    finding = f"all {versions.pop()}" if ok else ", ".join(f"{name} {version}" for name, version in found.items())
    return Check(name="packages", ok=ok, finding=finding)


def _torch() -> Check:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    finding = f"{torch.__version__} at {Path(torch.__file__).parent}; 2.11 and later are served"
    return Check(name="torch", ok=(major, minor) >= (2, 11), finding=finding)


def _devices() -> Check:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check(name="devices", ok=True, finding=", ".join(["cpu", *names]))


def _backends() -> Check:
    finding = ", ".join(available_backends())
    finding += "".join(f"; not {name}: {reason}" for name, reason in unavailable_backends().items())
    return Check(name="attention backends", ok=bool(available_backends()), finding=finding)


def _headers() -> Check:
    files = [
        Path(get_include()) / "xllm_metadata/attention_metadata.h",
        Path(get_cmake_dir()) / "xllm_executor-config.cmake",
    ]
    missing = [str(file) for file in files if not file.is_file()]
    version = ".".join(map(str, CONTRACT_VERSION))
    finding = f"missing {missing}" if missing else f"contract {version}, CMake package at {get_cmake_dir()}"
    return Check(name="C++ side", ok=not missing, finding=finding)
