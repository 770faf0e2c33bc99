"""The bridge's C++ names and macros are its own, so that it links with a framework whose namespace is xllm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import xllm_executor
import xllm_metadata

HEADERS = {
    "XLLM_METADATA_": Path(xllm_metadata.get_include()),
    "XLLM_EXECUTOR_": Path(xllm_executor.get_cmake_dir()).parent / "bridge",
}


def test_a_framework_with_structs_of_the_same_names_links_and_keeps_them(
    hosts: Path, run_program: Callable[..., subprocess.CompletedProcess[str]], small_checkpoint: Path
) -> None:
    result = run_program(hosts / "names_host", small_checkpoint, sys.executable)
    assert result.returncode == 0, result.stderr
    described = "7 Xllm a dtype that is too long for the small buffer of a string 4 4 8"
    assert json.loads(result.stdout) == {"bridge": "llama 1", "before": described, "after": described, "own": "host"}


def test_no_macro_and_no_namespace_lacks_the_package_prefix() -> None:
    for prefix, folder in HEADERS.items():
        files = [*folder.rglob("*.h"), *folder.rglob("*.cpp")]
        assert files
        for file in files:
            text = file.read_text()
            assert all(name.startswith(prefix) for name in re.findall(r"^#define (\w+)", text, re.MULTILINE)), file
            namespaces = set(re.findall(r"^namespace (\w+)(?:::\w+)* \{", text, re.MULTILINE))
            assert namespaces <= {prefix.lower().rstrip("_"), "detail"}, file


def test_no_symbol_of_the_bridge_is_in_the_namespace_of_the_framework(hosts: Path) -> None:
    symbols = subprocess.run(
        ["nm", "--demangle", hosts / "libxllm_executor_bridge.a"], capture_output=True, text=True, check=True
    ).stdout
    assert "xllm_executor::PyExecutor::execute" in symbols
    assert not re.findall(r"\bxllm::\w+", symbols)


def test_every_public_declaration_has_a_doxygen_comment() -> None:
    """A struct, class, enum, alias or function of a namespace; and no comment that Doxygen would not see."""
    declaration = re.compile(r"(struct|class|enum class|template|inline|constexpr|\[\[nodiscard\]\]|using \w+ =)\b.*")
    for folder in HEADERS.values():
        files = [file for file in folder.rglob("*.h") if "src" not in file.relative_to(folder).parts]
        assert files
        for file in files:
            lines = file.read_text().splitlines()
            assert lines[0] == "/// @file", file
            public = True
            for before, line in zip(["", *lines], lines, strict=False):
                if line.startswith(("namespace detail", "}  // namespace detail")):
                    public = line.startswith("}")
                plain = re.search(r"(^|\s)//(?!/)", line)
                assert plain is None or line.startswith(("///", "}  // namespace")), f"{file}: {line}"
                if public and declaration.fullmatch(line):
                    assert before.strip().startswith(("///", "template", "requires")), f"{file}: {line}"
