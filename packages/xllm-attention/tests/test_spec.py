from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from xllm_attention import AttentionSpec
from xllm_metadata import CacheKind


def test_equal_specs_are_one_key(spec: AttentionSpec) -> None:
    assert {spec: 1, replace(spec): 2} == {spec: 2}
    assert spec != replace(spec, sliding_window=4)
    assert spec != replace(spec, sinks=True)
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
        ({"v_head_dim": -1}, "v_head_dim is -1; it must be at least 0"),
        ({"v_head_dim": 999, "latent": True}, "v_head_dim is 999; a latent layer has values of at most 8"),
    ],
)
def test_bad_values_are_named(spec: AttentionSpec, change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(spec, **change)


def test_a_value_head_may_have_a_size_of_its_own(spec: AttentionSpec) -> None:
    own = replace(spec, v_head_dim=5)
    assert (spec.value_head_dim, own.value_head_dim) == (spec.head_dim, 5)
    assert replace(spec, v_head_dim=spec.head_dim) == spec  # one group
    assert replace(spec, head_dim=32).value_head_dim == 32


def test_cache_specs(spec: AttentionSpec) -> None:
    def shapes(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
        specs = spec.cache_specs(torch.float16)
        assert all(one.kind is CacheKind.PAGED and one.dtype is torch.float16 for one in specs)
        return {one.name: one.shape for one in specs}

    assert shapes(spec) == {"k": (2, spec.head_dim), "v": (2, spec.head_dim)}
    assert shapes(replace(spec, v_head_dim=5)) == {"k": (2, spec.head_dim), "v": (2, 5)}
    assert shapes(replace(spec, v_head_dim=5, latent=True)) == {"k": (2, spec.head_dim)}
