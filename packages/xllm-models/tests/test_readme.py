"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_example_gives_hf_s_next_token(
    write_checkpoint: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, directory = write_checkpoint("qwen3", head_dim=8)
    (tmp_path / "checkpoint").symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    with torch.no_grad():
        want = hf(torch.tensor([[5, 9, 2]])).logits[0, -1].argmax()
    assert names["next_token"] == want
