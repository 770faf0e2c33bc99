"""The README's example runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(example, namespace)
    assert namespace["slots"] == [2 * 4 - 1 + 12, 2 * 4, 2 * 4 + 1, 3 * 4]
