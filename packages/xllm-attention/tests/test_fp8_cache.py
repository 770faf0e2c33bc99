"""The fp8 cache: its scales, the rounding of its entries, refusals by name, and the error against a bf16 cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendLimits, CacheScales, create_backend
from xllm_attention.conformance.harness import nearest_fp8
from xllm_attention.fp8_cache import FP8, dequantize, quantize
from xllm_metadata import LayerCache, allocate_caches, build_attention_metadata

LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.bfloat16, max_num_seqs=4, max_num_tokens=64, max_model_len=64
)
SPEC = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=64**-0.5, cache_dtype=FP8)


def test_layers_of_unequal_scales_form_one_group() -> None:
    specs = [replace(SPEC, cache_scales=CacheScales(k, 2 * k)) for k in (0.25, 0.5)]
    backend = create_backend("torch", specs, LIMITS)
    assert backend.groups == ((0, 1),)
    assert [scales.k for scales in backend.cache_scales if scales is not None] == [0.25, 0.5]
    assert replace(SPEC, cache_dtype=None, cache_scales=None) != SPEC


def test_a_cache_of_the_models_dtype_has_no_scales() -> None:
    plain = replace(SPEC, cache_dtype=None, cache_scales=None)
    assert create_backend("torch", [plain], LIMITS).cache_scales == (None,)
    assert {one.dtype for one in plain.cache_specs(torch.bfloat16)} == {torch.bfloat16}
    assert [(one.name, one.dtype, one.bytes_per_entry) for one in SPEC.cache_specs(torch.bfloat16)] == [
        ("k", FP8, 128),
        ("v", FP8, 128),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e5m2])
def test_another_cache_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"cache_dtype is {dtype}; it must be torch.float8_e4m3fn"):
        replace(SPEC, cache_dtype=dtype)


def test_scales_without_an_fp8_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="a cache of the model's dtype has none"):
        replace(SPEC, cache_dtype=None)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
def test_scales_are_positive_and_finite(scale: float) -> None:
    scales = CacheScales()
    with pytest.raises(ValueError, match=r"v_scale is .*; it must be positive and finite in fp32"):
        scales.load(1.0, scale)
    assert (scales.k, scales.v) == (1.0, 1.0)


def test_scales_are_loaded_once() -> None:
    scales = CacheScales()
    scales.load(0.5, 0.1)
    scales.load(0.5, 0.1)
    assert scales.v == float(torch.tensor(0.1))  # as fp32
    with pytest.raises(ValueError, match=r"k_scale and v_scale are \(0.5, 1.0\); an earlier load set"):
        scales.load(0.5, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-4, 1000.0])
def test_entries_are_the_nearest_ones(dtype: torch.dtype, scale: float) -> None:
    """All numbers of 16 bits, against a lookup in the table of all fp8 numbers."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype) if dtype.itemsize == 2 else bits.view(torch.bfloat16).to(dtype) * 1.0003
    entries, want = quantize(values, scale), nearest_fp8(values, scale).to(FP8)
    assert torch.equal(entries.isnan(), ~values.isfinite())
    finite = values.isfinite()
    assert torch.equal(entries.view(torch.uint8)[finite], want.view(torch.uint8)[finite])
    products = want[finite].float() * torch.tensor(scale)
    assert torch.equal(dequantize(entries, scale, torch.float32)[finite], products)


@pytest.mark.parametrize("name", ["triton", "torch", "auto", "decode=torch,prefill=torch"])
def test_latent_keys_in_fp8_are_refused_by_name(name: str) -> None:
    spec = replace(SPEC, latent=True, num_kv_heads=1, head_dim=96, v_head_dim=64)
    with pytest.raises(ValueError, match="float8_e4m3fn with latent keys; served are layers with keys and values"):
        create_backend(name, [spec], replace(LIMITS, dtype=torch.float32))


class _Plain(AttentionBackend):
    """An out-of-tree backend that states nothing of fp8."""

    name = "plain"
    capabilities = replace(create_backend("torch", [SPEC], LIMITS).capabilities, cache_dtypes=frozenset())
    _bind = _plan_step = _plan_group = _run = lambda *arguments: None  # type: ignore[assignment]


def test_a_backend_serves_fp8_caches_only_if_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"'plain' cannot serve layer 0: a cache of torch.float8_e4m3fn; served are"):
        _Plain([SPEC], LIMITS)


def test_a_compute_capability_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    limits = replace(LIMITS, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"float8_e4m3fn on compute capability 8.0; served are 8.9 and later"):
        create_backend("triton", [SPEC], limits)


def _outputs(spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    backend = create_backend("torch", [spec], LIMITS)
    (cache,) = allocate_caches([spec.cache_specs(torch.bfloat16)], num_pages=8, page_size=8)
    backend.bind_kv_caches([LayerCache(k=cache.k, v=cache.v)])
    out = torch.empty_like(q)
    backend.plan(build_attention_metadata([q.shape[0]], [q.shape[0]], [[5, 1, 7, 2]], 8))
    backend.run(q, k, v, out, 0)
    return out.double()


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_error_against_a_bf16_cache_is_that_of_three_mantissa_bits(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((32, 12, 64), generator=generator).to(torch.bfloat16)
    q, k, v = rows[:, :8] / size, rows[:, 8:10] * size, rows[:, 10:] * size
    scales = CacheScales(float(k.abs().max()) / 448, float(v.abs().max()) / 448)
    exact = _outputs(replace(SPEC, cache_dtype=None, cache_scales=None), k, v, q)
    rounded = _outputs(replace(SPEC, cache_scales=scales), k, v, q)
    error = ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    # An element is off by 2^-4 of itself at most: in the values, and in the keys, where errors partly cancel.
    assert 1e-3 < error < 2 * 2**-4
