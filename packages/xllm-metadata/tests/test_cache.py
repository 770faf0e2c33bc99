"""Names, shapes and allocation of cache tensors."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from xllm_metadata import CacheKind, CacheSpec, LayerCache, allocate_caches

K, V = torch.zeros(1), torch.ones(1)
CONV = CacheSpec("conv", (6, 3), torch.bfloat16)
SSM = CacheSpec("ssm", (2, 4, 5), torch.float32)
KEYS = CacheSpec("k", (2, 8), torch.float16)


def test_tensors_are_named_in_order() -> None:
    cache = LayerCache.from_tensors((K, V))
    assert cache.k is K
    assert cache.v is V
    assert cache.index is None
    assert dict(cache.items()) == {"k": K, "v": V}
    assert LayerCache.from_tensors(cache) is cache
    assert list(LayerCache.from_tensors((None, V)).items()) == [("v", V)]


def test_tensors_are_named_by_the_specs() -> None:
    assert dict(LayerCache.from_tensors((K, V), [SSM, CONV]).items()) == {"ssm": K, "conv": V}
    assert dict(LayerCache.from_tensors((K,), [KEYS]).items()) == {"k": K}


@pytest.mark.parametrize(
    ("number", "specs", "needed"), [(6, None, "2: k, v"), (2, [KEYS], "1: k"), (0, [KEYS], "1: k")]
)
def test_another_number_of_tensors_is_refused(number: int, specs: list[CacheSpec] | None, needed: str) -> None:
    with pytest.raises(ValueError, match=f"a layer's cache has {number} tensors; it needs {needed}"):
        LayerCache.from_tensors([K] * number, specs)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no cache tensor 'keys'; known are k, v, index, conv, ssm"):
        CacheSpec("keys", (2, 8), torch.float16)


def test_every_tensor_of_a_layer_has_a_kind() -> None:
    cache = LayerCache(**{field.name: torch.zeros(1) for field in fields(LayerCache)})
    assert cache.of_kind(CacheKind.PAGED) == [cache.k, cache.v, cache.index]
    assert cache.of_kind(CacheKind.STATE) == [cache.conv, cache.ssm]


def test_sizes_of_a_spec() -> None:
    assert (KEYS.kind, CONV.kind, SSM.kind) == (CacheKind.PAGED, CacheKind.STATE, CacheKind.STATE)
    sizes = {"num_pages": 7, "page_size": 16, "num_slots": 3}
    assert KEYS.tensor_shape(**sizes) == (7, 16, 2, 8)
    assert SSM.tensor_shape(**sizes) == (3, 2, 4, 5)
    assert KEYS.bytes_per_entry == 2 * 8 * 2
    assert SSM.bytes_per_entry == 2 * 4 * 5 * 4


def test_caches_are_allocated_by_spec() -> None:
    state, keys = allocate_caches([[CONV, SSM], [KEYS]], num_pages=7, page_size=16, num_slots=3, fill=torch.nan)
    assert state.k is None
    assert keys.v is None
    found = {name: (tuple(tensor.shape), tensor.dtype) for cache in (state, keys) for name, tensor in cache.items()}
    assert found == {
        "conv": ((3, 6, 3), torch.bfloat16),
        "ssm": ((3, 2, 4, 5), torch.float32),
        "k": ((7, 16, 2, 8), torch.float16),
    }
    assert all(bool(tensor.isnan().all()) for cache in (state, keys) for _, tensor in cache.items())


def test_caches_of_a_group_have_its_number_of_pages() -> None:
    window = CacheSpec("k", (2, 8), torch.float16, group=1, window=32)
    caches = allocate_caches([[KEYS], [window], [CONV]], num_pages=[7, 3], page_size=16, num_slots=2)
    assert [tensor.shape[0] for cache in caches for _, tensor in cache.items()] == [7, 3, 2]
