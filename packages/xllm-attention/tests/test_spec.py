from __future__ import annotations

import math
from dataclasses import replace

import pytest

from xllm_attention import AttentionSpec


def test_equal_specs_are_one_key(spec: AttentionSpec) -> None:
    assert {spec: 1, replace(spec): 2} == {spec: 2}
    assert spec != replace(spec, sliding_window=4)
    assert spec.group_size == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1; it must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"num_heads": 5}, "num_heads is 5; it must be a multiple of num_kv_heads, 2"),
        ({"scale": math.nan}, "scale is nan; it must be finite"),
        ({"sliding_window": -1}, "sliding_window is -1; it must be at least 0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0; it must be finite and at least 0"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap is inf"),
    ],
)
def test_bad_values_are_named(spec: AttentionSpec, change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)
