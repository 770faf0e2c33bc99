"""What the flashinfer backend relies on is there: in 0.6.14 by importing it, in the newest release by its source.

No GPU is needed. The wheels are fetched once into .cache/flashinfer; XLLM_OFFLINE=1 says that they cannot be.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import xllm_attention

IMPORTED, PARSED = "0.6.14", "0.7.4"
REQUIREMENTS = {
    IMPORTED: (f"flashinfer-python=={IMPORTED}", "apache-tvm-ffi==0.1.15.post2", "nvidia-ml-py==13.615.71"),
    PARSED: (f"flashinfer-python=={PARSED}",),  # 100 MB, and 15 packages more to import it
}
CACHE = Path(__file__).parents[3] / ".cache" / "flashinfer"

INSPECT = """
import inspect, json, sys
import flashinfer, flashinfer.decode, flashinfer.prefill
modules = {"decode.py": flashinfer.decode, "prefill.py": flashinfer.prefill}
found = {}
for file, names in json.loads(sys.argv[1]).items():
    found[file] = {}
    for name in names:
        thing = modules[file]
        for part in name.split("."):
            thing = getattr(thing, part)
        found[file][name] = list(inspect.signature(thing).parameters)
print(json.dumps([flashinfer.__version__, found]))
"""


@pytest.fixture(scope="module")
def api() -> Any:
    """The backend's list of what it uses; loaded by path, since its package imports flashinfer."""
    path = Path(xllm_attention.__file__).parent / "backends" / "flashinfer_backend" / "api.py"
    spec = spec_from_file_location("flashinfer_backend_api", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unpacked(version: str) -> Path:
    """A folder with the wheels of one version unpacked."""
    folder = CACHE / version
    if (folder / "complete").is_file():
        return folder
    if os.environ.get("XLLM_OFFLINE") == "1":
        pytest.skip(f"NOT CHECKED: XLLM_OFFLINE=1 and FlashInfer {version} is not in {CACHE}")
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*command, *REQUIREMENTS[version]], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
    (folder / "complete").touch()
    return folder


def _missing(relied_on: dict[str, dict[str, tuple[str, ...]]], found: dict[str, dict[str, list[str]]]) -> list[str]:
    return [
        f"{file}: {name} has no parameter {parameter!r}" if name in found[file] else f"{file}: no {name}"
        for file, functions in relied_on.items()
        for name, parameters in functions.items()
        for parameter in parameters
        if parameter not in found[file].get(name, ())
    ]


def _parse(file: Path) -> tuple[dict[str, list[str]], set[str]]:
    """Parameters of every function and method of a file, and the attributes that it sets.

    Of overloads the last counts, which is the one that is called. A method that passes its **kwargs on to another one
    has that one's parameters too.
    """
    functions: dict[str, list[str]] = {}
    passed_on: dict[str, str] = {}
    tree = ast.parse(file.read_text())
    for prefix, node in [
        ("", tree),
        *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef)),
    ]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                arguments = child.args
                names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                functions[prefix + child.name] = names
                if arguments.kwarg and (target := _receiver(child, arguments.kwarg.arg)):
                    passed_on[prefix + child.name] = prefix + target
    for name, target in passed_on.items():
        functions[name] += functions.get(target, [])
    stored = (
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return functions, set(stored)


def _receiver(function: ast.FunctionDef, kwargs: str) -> str | None:
    """The method of the same object that a function gives its **kwargs to."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            for keyword in node.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == kwargs:
                    return node.func.attr
    return None


def test_signatures_by_import(api: Any) -> None:
    folder = _unpacked(IMPORTED)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INSPECT, json.dumps(api.RELIED_ON)],
        env={**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    version, found = json.loads(result.stdout.splitlines()[-1])
    assert version == IMPORTED
    assert _missing(api.RELIED_ON, found) == []


@pytest.mark.parametrize("version", [IMPORTED, PARSED])
def test_signatures_and_attributes_by_source(api: Any, version: str) -> None:
    folder = _unpacked(version)
    for file, functions in api.RELIED_ON.items():
        found, attributes = _parse(folder / "flashinfer" / file)
        assert _missing({file: functions}, {file: found}) == []
        assert set(api.RELIED_ON_ATTRIBUTES[file]) <= attributes


def test_a_lost_parameter_is_noticed(api: Any) -> None:
    found = {file: {name: list(names) for name, names in fs.items()} for file, fs in api.RELIED_ON.items()}
    assert _missing(api.RELIED_ON, found) == []
    found["decode.py"]["fast_decode_plan"].remove("global_override_indptr_cpu")
    del found["prefill.py"]["BatchPrefillWithPagedKVCacheWrapper.run"]
    missing = _missing(api.RELIED_ON, found)
    assert "decode.py: fast_decode_plan has no parameter 'global_override_indptr_cpu'" in missing
    assert "prefill.py: no BatchPrefillWithPagedKVCacheWrapper.run" in missing
