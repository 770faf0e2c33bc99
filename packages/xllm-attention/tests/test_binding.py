from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec
from xllm_metadata import LayerCache

MakeBackend = Callable[..., AttentionBackend]
SHAPE = (4, 16, 2, 8)
GOOD = torch.zeros(SHAPE)


def _cache(k: torch.Tensor | None = GOOD, v: torch.Tensor | None = GOOD) -> LayerCache:
    return LayerCache(k=k, v=v)


def _own(k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> LayerCache:
    """A cache with memory of its own for what is not given."""
    return LayerCache(k=torch.zeros(SHAPE) if k is None else k, v=torch.zeros(SHAPE) if v is None else v)


def _needs(found: str) -> str:
    return re.escape(f"{found}; its layer needs [num_pages, page_size, 2, 8]")


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([_cache()], "1 caches for 2 layers"),
        ([_cache()] * 3, "3 caches for 2 layers"),
        ([_cache(), _cache(v=None)], "v cache of layer 1 is None"),
        (
            [_cache(k=torch.zeros(4, 16, 16)), _cache()],
            _needs("k cache of layer 0 has shape [4, 16, 16]"),
        ),
        (
            [_cache(), _cache(k=torch.zeros(4, 16, 3, 8))],
            _needs("k cache of layer 1 has shape [4, 16, 3, 8]"),
        ),
        (
            [_cache(), _cache(v=torch.zeros(4, 16, 2, 9))],
            _needs("v cache of layer 1 has shape [4, 16, 2, 9]"),
        ),
        ([_cache(), _cache(k=GOOD.half())], "has dtype torch.float16; its layer needs torch.float32"),
        ([_cache(), _cache(k=GOOD.to("meta"))], "k cache of layer 1 is on meta; the backend was made for cpu"),
        ([_cache(k=torch.zeros(0, 16, 2, 8)), _cache()], "has num_pages 0; it must be at least 1"),
        ([_cache(k=torch.zeros(4, 0, 2, 8)), _cache()], "has page_size 0; it must be at least 1"),
        (
            [_cache(v=torch.zeros(5, 16, 2, 8)), _cache()],
            r"num_pages differs: 4 .k cache of layer 0., 5 .v",
        ),
        (
            [_cache(), _cache(*torch.zeros(2, 4, 8, 2, 8))],
            r"page_size differs: 16 \(k cache of layer 0\), 8 \(k cache of layer 1\)",
        ),
        (
            [_cache(), _cache(*torch.zeros(2, 5, 16, 2, 8))],
            r"num_pages differs: 4 \(k cache of layer 0\), 5 \(k cache of layer 1\); all caches must have the same",
        ),
        ([_cache(k=torch.zeros(1, 16, 2, 8).expand(SHAPE)), _cache()], "elements overlap"),
        ([_cache(k=torch.zeros(2000).as_strided(SHAPE, (255, 16, 8, 1))), _cache()], "elements overlap"),
    ],
)
def test_refusals(make_backend: MakeBackend, spec: AttentionSpec, caches: list[LayerCache], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend([spec, spec], bind=False).bind_kv_caches(caches)


PAGES = torch.zeros(5, 2, 16, 2, 8)


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([LayerCache(k=GOOD, v=GOOD)], "k cache of layer 0 and v cache of layer 0 share memory"),
        ([LayerCache(k=PAGES[1:, 0], v=PAGES[:-1, 0])], "v cache of layer 0 and k cache of layer 0 share memory"),
        ([_own(k=GOOD), _own(k=GOOD)], "k cache of layer 0 and k cache of layer 1 share memory"),
        (
            [_own(), _own(v=PAGES[:-1, 0]), _own(k=PAGES[:-1, 0])],
            "v cache of layer 1 and k cache of layer 2 share memory",
        ),
    ],
)
def test_shared_memory_is_refused_unless_the_specs_allow_it(
    make_backend: MakeBackend, spec: AttentionSpec, caches: list[LayerCache], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_backend([spec] * len(caches), bind=False).bind_kv_caches(caches)
    shared = replace(spec, shared_cache=True)
    make_backend([shared] * len(caches), bind=False).bind_kv_caches(caches)
    if len(caches) > 1:  # one of the two layers alone may not
        with pytest.raises(ValueError, match=message):
            make_backend([shared, *[spec] * (len(caches) - 1)], bind=False).bind_kv_caches(caches)


def test_layers_of_one_buffer_are_bound(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    pages = torch.zeros(4, 3, 2, 16, 2, 8)  # [page, layer, k or v, token, head, dim]
    layers = [LayerCache(k=pages[:, layer, 0], v=pages[:, layer, 1]) for layer in range(3)]
    make_backend([spec] * 3, bind=False).bind_kv_caches(layers)


@pytest.mark.parametrize("slot", ["index", "conv", "ssm"])
def test_a_cache_tensor_that_attention_does_not_use_is_refused(
    make_backend: MakeBackend, spec: AttentionSpec, slot: str
) -> None:
    extra: dict[str, torch.Tensor] = {slot: torch.zeros(4, 3)}
    caches = [_cache(), LayerCache(k=GOOD, v=GOOD, **extra)]
    message = rf"{slot} cache of layer 1 has shape \[4, 3\]; its layer needs only k and v"
    with pytest.raises(ValueError, match=message):
        make_backend([spec, spec], bind=False).bind_kv_caches(caches)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 2, 16, 2, 8)[:, 0],  # k and v of a page side by side
        torch.zeros(4, 2, 16, 8).transpose(1, 2),  # heads first
        torch.zeros(2, 8, 16, 4).permute(3, 2, 0, 1),  # everything turned round
        torch.zeros(4, 16, 2, 16)[..., ::2],  # gaps
        torch.zeros(512).as_strided((1, 16, 2, 8), (0, 16, 8, 1)),  # a size of one, whose stride means nothing
        torch.zeros(2000).as_strided(SHAPE, (480, 30, 15, 2)),  # each dimension starts right after the last element
    ],
)
def test_strides_without_overlap_are_bound(
    make_backend: MakeBackend, spec: AttentionSpec, tensor: torch.Tensor
) -> None:
    make_backend([spec], bind=False).bind_kv_caches([LayerCache(k=tensor, v=torch.zeros(tensor.shape))])
