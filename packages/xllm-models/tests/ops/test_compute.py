"""Compute ops against HF transformers' modules, bit by bit in fp32 and bf16, and against their own schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from xllm_models import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 7)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def hf_norm(weight: torch.Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.shape[0], eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_has_the_bits_of_hf(rows: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, 48, dtype=dtype), random(48, dtype=dtype)
    got = ops.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert torch.equal(got, hf_norm(weight, 1e-5)(x))


def test_rms_norm_of_heads_in_a_fused_projection_is_contiguous() -> None:
    heads = random(5, 6, 8)[:, 1:4]
    got = ops.rms_norm(heads, random(8), 1e-6)
    assert got.is_contiguous()
    assert torch.equal(got, hf_norm(random(8), 1e-6)(heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_fused_add_rms_norm_is_the_sum_then_the_norm_and_leaves_its_inputs(rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, 48, dtype=dtype), random(rows, 48, dtype=dtype) * 3, random(48, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, hf_norm(weight, 1e-6)(residual + x))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul_rounds_as_hf(rows: int, dtype: torch.dtype) -> None:
    x = random(rows, 40, dtype=dtype)
    got = ops.silu_and_mul(x)
    assert got.is_contiguous()
    # The vector and the scalar loop of silu may differ in the last bit, and strides decide which one runs; a missing
    # rounding would show in many elements.
    want = torch.nn.functional.silu(x[:, :20].contiguous()) * x[:, 20:]
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (got != want).sum() <= 0.05 * want.numel()


def test_silu_and_mul_refuses_an_odd_dimension() -> None:
    with pytest.raises(ValueError, match="even last dimension, got 7"):
        ops.silu_and_mul(random(2, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_features", [16, 12, 4])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rotary_has_the_bits_of_hf(num_features: int, rows: int, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    qkv = random(rows, 8, 16, dtype=dtype)
    q, k = qkv[:, :4], qkv[:, 4:6]
    positions = torch.tensor([3, 0, 8, 8, 2, 1, 9][:rows], dtype=index_dtype)
    angles = random(10, num_features // 2)
    got = ops.rotary(q, k, positions, torch.cat((angles.cos(), angles.sin()), dim=1))
    # HF's partial form is Phi-3's; its layout is [batch, heads, rows, features].
    full = torch.cat((angles, angles), dim=1)[positions.long()].unsqueeze(0)
    cos, sin = full.cos().to(dtype), full.sin().to(dtype)
    want = apply_rotary_pos_emb(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 5])
def test_ops_keep_their_schemas_and_fakes(rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, 32, dtype=dtype), random(rows, 32, dtype=dtype), random(32, dtype=dtype)
    qkv = random(rows, 8, 16, dtype=dtype)
    positions = torch.arange(rows, dtype=torch.int32)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("rms_norm", (x, weight, 1e-6)),
        ("fused_add_rms_norm", (x, residual, weight, 1e-6)),
        ("silu_and_mul", (x,)),
        ("rotary", (random(rows, 4, 16, dtype=dtype), random(rows, 2, 16, dtype=dtype), positions, random(9, 16))),
    ]
    if rows:  # opcheck itself fails on views without elements
        columns = random(32, rows, dtype=dtype).t()
        cases += [
            ("rms_norm", (qkv[:, 1:3], random(16, dtype=dtype), 1e-6)),
            ("rms_norm", (columns, weight, 1e-6)),
            ("fused_add_rms_norm", (columns, residual, weight, 1e-6)),
            ("silu_and_mul", (columns,)),
            ("rotary", (qkv[:, :4], qkv[:, 4:6], positions, random(9, 8))),
        ]
    for name, arguments in cases:
        torch.library.opcheck(getattr(torch.ops.xllm, name).default, arguments)
