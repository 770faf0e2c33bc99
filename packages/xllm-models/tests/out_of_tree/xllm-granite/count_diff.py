"""Counts what the port of a model took: python count_diff.py PORT.

Lines that are not blank are compared without their indentation: with HF's file of the same family (transformers'
models/NAME/modeling_NAME.py), and with the port's nearest relative in the package, models/llama.py, once its classes
bear the port's name.
"""

from __future__ import annotations

import importlib.util
import sys
from difflib import SequenceMatcher
from importlib.metadata import version
from pathlib import Path


def code_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def count(port: str, reference: str) -> str:
    ours, theirs = code_lines(port), code_lines(reference)
    kept = sum(block.size for block in SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks())
    return f"{len(ours)} lines for {len(theirs)}: {kept} kept, {len(ours) - kept} added, {len(theirs) - kept} dropped"


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> None:
    path = Path(sys.argv[1])
    port = path.read_text(encoding="utf-8")
    hf = package_folder("transformers") / "models" / path.stem / f"modeling_{path.stem}.py"
    llama = (package_folder("xllm_models") / "models" / "llama.py").read_text(encoding="utf-8")
    renamed = llama.replace("Llama", path.stem.capitalize())
    print(f"{path.name} and transformers {version('transformers')} {hf.name}: {count(port, hf.read_text('utf-8'))}")
    print(f"{path.name} and xllm_models llama.py, renamed: {count(port, renamed)}")


if __name__ == "__main__":
    main()
