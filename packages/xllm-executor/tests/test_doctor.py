"""`doctor` in environments where one requirement is missing, broken or of another version."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xllm_executor import doctor_build
from xllm_metadata import CONTRACT_VERSION

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
NAMES = [
    *("python", "packages", "torch", "devices", "attention backends", "C++ side"),
    *("libpython", "Python.h", "compiler", "CMake", "build tool", "embedding"),
]


def ask(**environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, {name: check}) of `doctor --json`."""
    result = subprocess.run(
        [sys.executable, "-m", "xllm_executor", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["ok"] == all(check["ok"] for check in report["checks"]) == (result.returncode == 0)
    assert all(bool(check["remedy"]) != check["ok"] for check in report["checks"])
    return result.returncode, {check["name"]: check for check in report["checks"]}


def test_a_good_environment() -> None:
    code, checks = ask()
    assert code == 0
    assert list(checks) == NAMES
    version = ".".join(map(str, CONTRACT_VERSION))
    assert checks["C++ side"]["finding"].startswith(f"contract {version}, CMake package at ")


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("raise OSError('libtorch_cpu.so: cannot open shared object file')", "import fails: OSError: libtorch_cpu.so"),
        ("import os; os.abort()", "import fails: ended by SIGABRT"),
        ("import sys; sys.exit(3)", "import fails: exit code 3"),
        ("import os; os._exit(0)", "import fails: the process ended early"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "import fails: ended by signal 35"),
        ("(", "import fails: SyntaxError: "),
        ("", "import fails: AttributeError: "),
    ],
)
def test_a_broken_torch(tmp_path: Path, statement: str, finding: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{statement}\n")
    code, checks = ask(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert not checks["torch"]["ok"]
    assert checks["torch"]["finding"].startswith(finding)
    assert "torch>=2.11" in checks["torch"]["remedy"]
    assert checks["embedding"]["ok"]
    assert checks["C++ side"]["ok"]
    lines = subprocess.run(
        [sys.executable, "-m", "xllm_executor", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (lines.returncode, lines.stderr) == (1, "")
    assert "Traceback" not in lines.stdout
    assert f"FAIL torch               {finding}" in lines.stdout


@pytest.mark.parametrize(
    "use", ["import xllm_executor; xllm_executor.ModelExecutor", "from xllm_executor import ModelExecutor"]
)
@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise OSError('libtorch_cpu.so: cannot open shared object file')", "OSError: libtorch_cpu.so: cannot open"),
        ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x"),
        ("raise RuntimeError('no such op')", "RuntimeError: no such op"),
        ("", "ImportError: xllm_executor.ModelExecutor cannot be imported: module 'torch' has no attribute"),
    ],
)
def test_a_broken_torch_fails_the_first_use(tmp_path: Path, use: str, statement: str, error: str) -> None:
    """The package itself is imported without torch; the class names the cause, and does not seem to be absent."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{statement}\n")
    result = subprocess.run(
        [sys.executable, "-c", f"import xllm_executor; print('imported'); {use}; print('used')"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "imported\n")
    assert result.stderr.splitlines()[-1].startswith(error), result.stderr


TORCH = """
__version__ = VERSION
compiled_with_cxx11_abi = lambda: ABI
class cuda:
    device_count = lambda: 0
"""


@pytest.mark.parametrize(
    ("version", "abi", "finding"),
    [
        ("2.11.0", "True", "; missing: "),
        ("2.9.1+cu128", "True", "2.9.1+cu128 at "),
        ("2.11.0", "False", "; built with the old libstdc++ ABI"),
    ],
)
def test_another_torch(tmp_path: Path, version: str, abi: str, finding: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH.replace("VERSION", repr(version)).replace("ABI", abi))
    code, checks = ask(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert not checks["torch"]["ok"]
    assert finding in checks["torch"]["finding"]


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("name", "text", "check", "finding"),
    [
        ("cmake", "echo cmake version 3.19.8", "CMake", "cmake version 3.19.8 at "),
        ("cmake", "echo broken >&2; exit 1", "CMake", "does not run: broken"),
        ("cmake", "echo hello", "CMake", "does not run: it prints no version"),
        ("ninja", "exit 1", "build tool", "does not run: exit code 1"),
        ("c++", "echo \"error: unknown option '-std=c++20'\" >&2; exit 1", "compiler", "unknown option '-std=c++20'"),
    ],
)
def test_a_tool_that_is_old_or_broken(tmp_path: Path, name: str, text: str, check: str, finding: str) -> None:
    tools = tmp_path / "tools"
    script(tools, name, text)
    if name == "ninja":
        script(tools, "make", text)
        script(tools, "gmake", text)
    code, checks = ask(PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert code == 1
    assert not checks[check]["ok"]
    assert finding in checks[check]["finding"]


def test_a_path_without_tools(tmp_path: Path) -> None:
    _, checks = ask(PATH=str(tmp_path))
    assert checks["compiler"]["finding"] == "no c++, g++ or clang++ on the path"
    assert checks["embedding"]["finding"] == "not tried, since another check fails"
    for check, tool in (("CMake", "cmake"), ("build tool", "ninja")):
        beside = (Path(sys.executable).parent / tool).is_file()
        assert checks[check]["ok"] == beside


@pytest.mark.parametrize(
    ("environment", "finding"),
    [
        ({"CXX": "/none/g++"}, "CXX is /none/g++, which is not there"),
        ({"CXXFLAGS": "-D_GLIBCXX_USE_CXX11_ABI=0"}, "the old libstdc++ ABI"),
        ({"CXXFLAGS": "-nostdinc++"}, "does not compile C++20"),
    ],
)
def test_a_compiler_of_another_kind(environment: dict[str, str], finding: str) -> None:
    code, checks = ask(**environment)
    assert code == 1
    assert finding in checks["compiler"]["finding"]


Fake = Callable[..., Path]


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """`fake_python(name, content)`: the only folder for libpython and headers is a new one, with that file."""

    def fake(name: str = "", content: bytes = b"") -> Path:
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path / "lib") if "LIB" in name else "")
        monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "include"))
        monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
        return tmp_path

    return fake


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("", "no libpython"),
        (f"lib/libpython{VERSION}.a", "is static, and no libpython"),
        (f"lib/libpython{VERSION}.so", "cannot be loaded: OSError"),
        ("lib/libpython3.9.so", "no libpython"),
    ],
)
def test_no_usable_libpython(fake_python: Fake, name: str, finding: str) -> None:
    fake_python(name, b"not an ELF file")
    for check in (doctor_build.libpython, doctor_build.embedding):
        with pytest.raises(doctor_build.MissingError) as caught:
            check()
        assert f"install libpython{VERSION}" in caught.value.remedy
        assert finding in (caught.value.finding if check is doctor_build.libpython else finding)


def test_a_library_of_another_kind(fake_python: Fake) -> None:
    """It loads, and is not Python."""
    folder = fake_python() / "lib"
    folder.mkdir()
    library = folder / f"libpython{VERSION}.so"
    command = ["c++", "-shared", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(
        command, input='extern "C" const char* Py_GetVersion() { return "2.7.18 (old)"; }', text=True, check=True
    )
    with pytest.raises(doctor_build.MissingError, match=r"is of Python 2\.7\.18, not "):
        doctor_build.libpython()
    subprocess.run(command, input="int nothing;", text=True, check=True)
    with pytest.raises(doctor_build.MissingError, match="cannot be loaded: AttributeError"):
        doctor_build.libpython()


def test_a_libpython_with_a_versioned_name_only(fake_python: Fake) -> None:
    real = doctor_build.find_libpython()
    folder = fake_python() / "lib"
    folder.mkdir()
    versioned = folder / f"libpython{VERSION}.so.1.0"
    shutil.copy(real, versioned)
    assert doctor_build.libpython() == f"{versioned}; pass -DPython_LIBRARY={versioned} to CMake"


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        ({}, "no Python.h in "),
        ({"Python.h": ""}, "has Python.h, but no patchlevel.h and no pyconfig.h"),
        ({"Python.h": "", "pyconfig.h": "", "patchlevel.h": '#define PY_VERSION "3.9.1"\n'}, "is of Python 3.9, not "),
    ],
)
def test_no_usable_headers(fake_python: Fake, files: dict[str, str], finding: str) -> None:
    for name, text in files.items():
        fake_python(f"include/{name}", text.encode())
    fake_python()
    with pytest.raises(doctor_build.MissingError) as caught:
        doctor_build.find_include_dir()
    assert finding in caught.value.finding
    assert f"python{VERSION}-dev" in caught.value.remedy


def test_headers_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").write_text("#error no configuration\n")
    monkeypatch.setattr(doctor_build, "find_include_dir", lambda: str(tmp_path))
    with pytest.raises(doctor_build.MissingError, match=r"a program that embeds Python fails: .*no configuration"):
        doctor_build.embedding()


def test_the_options_of_a_developer_name_the_same_files() -> None:
    script = Path(__file__).resolve().parents[3] / "ci" / "embedding.py"
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_LIBRARY={doctor_build.find_libpython()}",
        f"-DPython_INCLUDE_DIR={doctor_build.find_include_dir()}",
    ]
