"""LayerCache: names for the tensors of a host's tuple."""

from __future__ import annotations

import pytest
import torch

from xllm_metadata import LayerCache

K, V = torch.zeros(1), torch.ones(1)


def test_tensors_are_named_in_order() -> None:
    cache = LayerCache.from_tensors((K, V))
    assert cache.k is K
    assert cache.v is V
    assert cache.index is None
    assert dict(cache.items()) == {"k": K, "v": V}
    assert LayerCache.from_tensors(cache) is cache
    assert list(LayerCache.from_tensors((None, V)).items()) == [("v", V)]


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="a layer's cache has 6 tensors; at most 5 are known"):
        LayerCache.from_tensors([K] * 6)
