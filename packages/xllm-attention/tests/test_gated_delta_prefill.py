"""Steps with several rows per sequence by way of fla's interface, which loops in float64 stand for here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from xllm_attention import GatedDeltaNetSpec, StateStep
from xllm_attention.gated_delta_prefill import GatedDeltaPrefill
from xllm_metadata import LayerCache, allocate_caches

SPEC = GatedDeltaNetSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6, conv_kernel_size=4)
NUM_SLOTS = 7


def convolve(
    x: torch.Tensor, weight: torch.Tensor, *, activation: str, initial_state: torch.Tensor, output_final_state: bool,
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """fla's causal_conv1d: x [1, T, C], weight [C, W], states [N, C, W] of the last W rows."""
    assert activation == "silu"
    assert output_final_state
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    width, outputs, states = weight.shape[1], [], []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        assert start < stop, "a sequence without rows"
        window = torch.cat((initial_state[n].T, x[0, start:stop])).double()  # [W + rows, C]
        rows = [(window[i + 1 : i + 1 + width] * weight.double().T).sum(0) for i in range(stop - start)]
        outputs += [functional.silu(row) for row in rows]
        states.append(window[-width:].T)
    return torch.stack(outputs)[None].to(x.dtype), torch.stack(states).to(x.dtype)


def apply_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """fla's chunk_gated_delta_rule: q, k [1, T, Hk, Dk], v [1, T, Hv, Dv], g, beta [1, T, Hv], row by row."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    q, k = (functional.normalize(x[0].double(), dim=-1).repeat_interleave(2, dim=1) for x in (q, k))
    out, states = torch.empty(v.shape[1:], dtype=torch.float64), initial_state.double()
    for n, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        for row in range(start, stop):
            state = states[n] * g[0, row].double().exp()[:, None, None]
            delta = (v[0, row].double() - torch.einsum("hk,hkv->hv", k[row], state)) * beta[0, row, :, None].double()
            states[n] = state + k[row][:, :, None] * delta[:, None, :]
            out[row] = torch.einsum("hk,hkv->hv", q[row], states[n]) * q.shape[-1] ** -0.5
    return out[None].to(v.dtype), states.float()


@pytest.mark.parametrize(
    ("bounds", "read", "write", "initial"),
    [
        ((0, 5), (3,), (3,), (True,)),
        ((0, 70, 71, 140), (0, 4, 2), (0, 4, 2), (True, False, True)),
        ((0, 0, 3, 3, 9, 9), (0, 1, 2, 3, -1), (0, 1, 5, 3, -1), (True, True, True, False, False)),
        ((0, 2, 5), (1, 2), (4, -1), (True, True)),
    ],
    ids=["one", "several", "without rows", "write slots"],
)
def test_it_equals_the_formula(
    bounds: tuple[int, ...], read: tuple[int, ...], write: tuple[int, ...], initial: tuple[bool, ...]
) -> None:
    random = torch.Generator().manual_seed(1)
    num_rows, heads, channels = bounds[-1], SPEC.num_v_heads, SPEC.num_channels
    shapes = ((num_rows, channels), (num_rows, heads), (num_rows, heads), (channels, 4), (heads,), (heads,))
    (states,) = allocate_caches([SPEC.cache_specs(torch.float32)], num_pages=1, page_size=1, num_slots=NUM_SLOTS)
    for _, tensor in states.items():
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    slots = (torch.tensor(read, dtype=torch.int32), torch.tensor(write, dtype=torch.int32), torch.tensor(initial))
    run = GatedDeltaPrefill(convolve, apply_rule)
    for _ in range(2):  # two layers of one step, then two of the next
        step = StateStep(False, *slots, bounds)
        for _ in range(2):
            inputs = tuple(torch.randn(shape, generator=random) for shape in shapes)
            expected_states = LayerCache(**{slot: tensor.clone() for slot, tensor in states.items()})
            expected, out = torch.empty((2, num_rows, heads, SPEC.head_v_dim))
            SPEC.run(step, expected_states, inputs, expected)
            run(step, states, inputs, out, SPEC.head_k_dim)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            for (_, tensor), (_, wanted) in zip(states.items(), expected_states.items(), strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-4)
