"""Compute ops against HF transformers' modules, bit by bit in fp32 and bf16, and against their own schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_interleaved
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from xllm_models import TensorParallel, ops
from xllm_models.ops.moe import fused_experts_static

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_unit_offset_norms_have_the_bits_of_gemma(rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(rows, 48, dtype=dtype), random(rows, 48, dtype=dtype) * 3, random(48, dtype=dtype)
    norm = Gemma3RMSNorm(48, 1e-5)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, True), norm(x))
    normed, total = ops.fused_add_rms_norm(x, residual, weight, 1e-5, True)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, norm(residual + x))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("approximate", "name"), [("none", "gelu"), ("tanh", "gelu_pytorch_tanh")])
def test_gelu_and_mul_is_hf_s_activation_times_up(approximate: str, name: str, dtype: torch.dtype) -> None:
    x = random(7, 40, dtype=dtype)
    got = ops.gelu_and_mul(x, approximate)
    assert got.is_contiguous()
    want = ACT2FN[name](x[:, :20].contiguous()) * x[:, 20:]
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_gated_activations_refuse_bad_input() -> None:
    with pytest.raises(ValueError, match="silu_and_mul needs an even last dimension, got 7"):
        ops.silu_and_mul(random(2, 7))
    with pytest.raises(ValueError, match="gelu_and_mul needs an even last dimension, got 7"):
        ops.gelu_and_mul(random(2, 7), "none")
    with pytest.raises(RuntimeError, match="approximate argument must be"):
        ops.gelu_and_mul(random(2, 8), "sigmoid")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_qk_norm_rope_is_the_norms_then_the_rotation(interleaved: bool, unit_offset: bool, dtype: torch.dtype) -> None:
    qkv = random(5, 8, 16, dtype=dtype)
    weights = random(16, dtype=dtype), random(16, dtype=dtype) + 1
    positions, angles = torch.tensor([3, 0, 8, 8, 2]), random(10, 8)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    normed = (ops.rms_norm(x, w, 1e-5, unit_offset) for x, w in zip((qkv[:, :4], qkv[:, 4:6]), weights, strict=True))
    want = ops.rotary(*normed, positions, table, interleaved)
    got = ops.qk_norm_rope(qkv[:, :4], qkv[:, 4:6], *weights, positions, table, 1e-5, unit_offset, interleaved)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 2), (1, 1), (5, 5)])
@pytest.mark.parametrize("rows", ROWS)
def test_moe_is_hf_s_sparse_block(rows: int, num_experts: int, top_k: int, normalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=24,
        moe_intermediate_size=16,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalize,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.copy_(random(*parameter.shape) * 0.3)
    x = random(rows, 24)
    choice = ops.topk_softmax(x @ block.gate.weight.t(), top_k, normalize)
    arguments = (x, *choice, block.experts.gate_up_proj, block.experts.down_proj)
    want = block(x.unsqueeze(0))[0] if rows else x
    torch.testing.assert_close(ops.fused_experts(*arguments), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused_experts_static(*arguments), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [7.0, 0.4])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 2), (1, 1), (5, 5)])
@pytest.mark.parametrize("rows", ROWS)
def test_experts_are_hf_s_of_gpt_oss(rows: int, num_experts: int, top_k: int, limit: float) -> None:
    config = GptOssConfig(
        hidden_size=24,
        intermediate_size=16,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        swiglu_alpha=1.3,
        swiglu_limit=limit,
    )
    config._experts_implementation = "eager"
    block = GptOssMLP(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.copy_(random(*parameter.shape) * 0.5)
    x, theirs = random(rows, 24), block.experts
    choice = ops.topk_softmax(x @ block.router.weight.t() + block.router.bias, top_k, True)
    # gate and up alternate in HF's columns
    gate_up = torch.cat((theirs.gate_up_proj[..., ::2], theirs.gate_up_proj[..., 1::2]), dim=-1).mT.contiguous()
    gate_up_bias = torch.cat((theirs.gate_up_proj_bias[:, ::2], theirs.gate_up_proj_bias[:, 1::2]), dim=-1)
    weights = (gate_up, theirs.down_proj.mT.contiguous(), gate_up_bias, theirs.down_proj_bias)
    arguments = (x, *choice, *weights, "swigluoai", 1.3, limit)
    want = block(x.unsqueeze(0))[0][0] if rows else x
    torch.testing.assert_close(ops.fused_experts(*arguments), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused_experts_static(*arguments), want, rtol=1e-5, atol=1e-5)


def test_linear_is_the_framework_s_product() -> None:
    x, weight, bias = random(3, 2, 8), random(5, 8), random(5)
    assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(ops.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("vocab_size", "size"), [(97, 2), (96, 4), (5, 4)])
def test_embedding_shards_are_each_rank_s_rows_and_zeros(
    vocab_size: int, size: int, rows: int, dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    whole = random(vocab_size, 9, dtype=dtype)
    held = -(-vocab_size // size)
    ids = torch.tensor([0, held - 1, held, vocab_size - 1, 2, 0, min(2 * held, vocab_size - 1)][:rows], dtype=id_dtype)
    shards = []
    for rank in range(size):
        shard, num_rows = TensorParallel(rank=rank, size=size).shard_padded(vocab_size)
        weight = torch.full((num_rows, 9), torch.nan, dtype=dtype)  # padding: no row of an id may show it
        weight[: shard.size] = whole[shard.start : shard.start + shard.size]
        shards.append(ops.embedding_shard(ids, weight, shard.start, shard.size, vocab_size))
    owners = (ids // held).tolist()
    want = torch.nn.functional.embedding(ids, whole)
    for rank, got in enumerate(shards):
        assert (got.shape, got.dtype) == ((rows, 9), dtype)
        mine = torch.tensor([owner == rank for owner in owners], dtype=torch.bool)
        assert torch.equal(got[mine], want[mine])
        assert torch.equal(got[~mine], torch.zeros_like(got[~mine]))


def test_an_embedding_shard_of_no_id_is_zero_and_bad_counts_are_named() -> None:
    elsewhere = torch.tensor([0, 3, 9, 19], dtype=torch.int32)
    assert torch.equal(ops.embedding_shard(elsewhere, random(6, 4), 4, 5, 20), torch.zeros(4, 4))
    for count in (7, -1):
        with pytest.raises(ValueError, match=f"count {count} is not within the weight's 6 rows"):
            ops.embedding_shard(elsewhere, random(6, 4), 4, count, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_id_outside_the_vocabulary_is_nan_on_every_rank(
    size: int, id_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """97 ids: on 2 and 4 ranks the last shard has padding rows, which belong to no id."""
    limits = torch.iinfo(id_dtype)
    ids = torch.tensor([-1, 96, 97, 98, 99, 100, 0, limits.max, limits.min], dtype=id_dtype)
    outside = (ids < 0) | (ids >= 97)
    for rank in range(size):
        shard, num_rows = TensorParallel(rank=rank, size=size).shard_padded(97)
        got = ops.embedding_shard(ids, random(num_rows, 9, dtype=dtype), shard.start, shard.size, 97)
        assert torch.isnan(got[outside]).all()
        assert not torch.isnan(got[~outside]).any()


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_features", [16, 12, 4])
def test_interleaved_rotary_has_the_bits_of_hf_s_glm(num_features: int, dtype: torch.dtype) -> None:
    qkv = random(5, 8, 16, dtype=dtype)
    q, k, positions, angles = qkv[:, :4], qkv[:, 4:6], torch.tensor([3, 0, 8, 8, 2]), random(10, num_features // 2)
    got = ops.rotary(q, k, positions, torch.cat((angles.cos(), angles.sin()), dim=1), interleaved=True)
    full = torch.cat((angles, angles), dim=1)[positions].unsqueeze(0)
    cos, sin = full.cos().to(dtype), full.sin().to(dtype)
    want = apply_interleaved(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
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
        ("rms_norm", (x, weight, 1e-6, True)),
        ("gelu_and_mul", (x, "tanh")),
        ("rotary", (random(rows, 4, 16, dtype=dtype), random(rows, 2, 16, dtype=dtype), positions, random(9, 16))),
        ("linear", (x, random(6, 32, dtype=dtype))),
        ("linear", (x, random(6, 32, dtype=dtype), random(6, dtype=dtype))),
    ]
    cases += [("embedding_shard", (ids, random(6, 32, dtype=dtype), 2, 5, 8)) for ids in (positions, positions.long())]
    gate_up, down = random(3, 16, 32, dtype=dtype), random(3, 32, 8, dtype=dtype)
    router_logits = random(rows, 3, dtype=dtype)
    cases.append(("topk_softmax", (router_logits, 2, True)))
    for weights, ids in (ops.topk_softmax(router_logits, 2, True), router_logits.float().topk(2)):
        cases.append(("fused_experts", (x, weights, ids, gate_up, down)))
        biases = (random(3, 16, dtype=dtype), random(3, 32, dtype=dtype))
        cases.append(("fused_experts", (x, weights, ids, gate_up, down, *biases, "swigluoai", 1.3, 0.5)))
    if rows:  # opcheck itself fails on views without elements
        columns = random(32, rows, dtype=dtype).t()
        cases += [
            ("rms_norm", (qkv[:, 1:3], random(16, dtype=dtype), 1e-6)),
            ("rms_norm", (columns, weight, 1e-6)),
            ("fused_add_rms_norm", (columns, residual, weight, 1e-6)),
            ("silu_and_mul", (columns,)),
            ("rotary", (qkv[:, :4], qkv[:, 4:6], positions, random(9, 8))),
            ("rotary", (qkv[:, :4], qkv[:, 4:6], positions, random(9, 8), True)),
            ("qk_norm_rope", (qkv[:, :4], qkv[:, 4:6], weight[:16], weight[16:], positions, random(9, 8), 1e-6)),
        ]
    for name, arguments in cases:
        torch.library.opcheck(getattr(torch.ops.xllm, name).default, arguments)
