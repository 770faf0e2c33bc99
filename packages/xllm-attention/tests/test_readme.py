"""The README's example runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.strip().splitlines()) <= 20
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert tuple(scope["out"].shape) == (3, 8, 64)  # type: ignore[attr-defined]
