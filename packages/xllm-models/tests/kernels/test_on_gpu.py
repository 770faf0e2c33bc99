"""The ops by dispatch on a CUDA device: they are the Triton kernels, and a captured graph holds them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_models import load_model, ops

pytestmark = pytest.mark.gpu


def calls(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Callable[[], Any]]]:
    """The input that the tests change, and one call of every compute op that depends on it."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype) * 0.5

    x, residual, weight, bias = random(num_tokens, 128), random(num_tokens, 128), random(128), random(64)
    heads = x.view(num_tokens, 8, 16)
    positions, table = torch.arange(num_tokens, device="cuda", dtype=torch.int32), random(num_tokens, 16).float()
    matrix, router, gate_up, down = random(64, 128), random(num_tokens, 8), random(8, 48, 128), random(8, 128, 24)
    return x, {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "fused_add_rms_norm": lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-6, True),
        "silu_and_mul": lambda: ops.silu_and_mul(x),
        "gelu_and_mul": lambda: ops.gelu_and_mul(x, "tanh"),
        "rotary": lambda: ops.rotary(heads[:, :4], heads[:, 4:6], positions, table),
        "rotary interleaved": lambda: ops.rotary(heads[:, :4], heads[:, 4:6], positions, table, interleaved=True),
        "qk_norm_rope": lambda: ops.qk_norm_rope(
            heads[:, :4], heads[:, 4:6], weight[:16], weight[16:32], positions, table, 1e-6
        ),
        "linear": lambda: ops.linear(x, matrix, bias),
        "embedding_shard": lambda: ops.embedding_shard(
            positions, x, num_tokens // 2, num_tokens - num_tokens // 2, num_tokens
        ),
        "topk_softmax": lambda: ops.topk_softmax(router, 2, True)[0],
        "fused_experts": lambda: ops.fused_experts(x, *ops.topk_softmax(router, 2, True), gate_up, down),
        "fused_experts with biases": lambda: ops.fused_experts(
            x,
            *ops.topk_softmax(router, 2, True),
            gate_up,
            down,
            gate_up[..., 0].contiguous(),
            down[..., 0].contiguous(),
            "swigluoai",
        ),
    }


def flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 200])
def test_a_graph_replays_what_eager_gives_bit_by_bit(num_tokens: int, dtype: torch.dtype) -> None:
    x, table = calls(num_tokens, dtype)
    for name, call in table.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = flat(call())
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            for tensor in captured:
                tensor.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            eager = flat(call())
            assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True)), name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_op_waits_for_the_device() -> None:
    _, table = calls(40, torch.bfloat16)
    for call in table.values():
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in table.values():
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_ops_on_cuda_run_triton() -> None:
    _, table = calls(4, torch.bfloat16)
    for name, call in table.items():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kernels = {event.key for event in profile.key_averages()}
        assert any(key.startswith("_") and "kernel" in key for key in kernels), (name, kernels)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma3_text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
        ("llama", {"attention_bias": True}),
        ("phi3", {"pad_token_id": None}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_families_on_cuda_equal_hf(
    family: str,
    config: dict[str, Any],
    write_checkpoint: Callable[..., Any],
    hf_logits: Callable[..., list[torch.Tensor]],
    paged: ModuleType,
) -> None:
    hf, directory = write_checkpoint(family, **config)
    want = hf_logits(hf)
    for sequence, start, logits in paged.run_steps(load_model(directory, device="cuda")):
        expected = want[sequence][start : start + len(logits)]
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    # In bf16, where an expert may flip, no farther from fp32 than HF in bf16 is.
    theirs = [logits.float() for logits in hf_logits(hf.bfloat16())]
    ours = [torch.empty_like(logits) for logits in want]
    for sequence, start, logits in paged.run_steps(load_model(directory, device="cuda", dtype=torch.bfloat16)):
        ours[sequence][start : start + len(logits)] = logits
    errors = [torch.cat([x - y for x, y in zip(got, want, strict=True)]).square().mean() for got in (ours, theirs)]
    assert errors[0].sqrt() <= 1.5 * errors[1].sqrt()
