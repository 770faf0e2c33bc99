"""Steps of Gated DeltaNet with several rows per sequence, in the kernels of flash-linear-attention (fla-core).

Owns the states' way in and out of fla's layout, and the offsets of the sequences, which fla wants in int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xllm_metadata import LayerCache

from .state import StateStep, read_states, write_states


class GatedDeltaPrefill:
    """Runs the steps of all layers; keeps the offsets of the last step for its other layers.

    Args:
        convolve: `fla.modules.causal_conv1d.causal_conv1d`.
        apply_rule: `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.
    """

    def __init__(self, convolve: Callable[..., Any], apply_rule: Callable[..., Any]) -> None:
        self._convolve, self._apply_rule = convolve, apply_rule
        self._step: StateStep | None = None  # that is planned
        self._live: StateStep | None = None  # its sequences with rows
        self._empty: StateStep | None = None  # the others, if there are any
        self._offsets: dict[str, torch.Tensor] = {}

    def __call__(
        self, step: StateStep, states: LayerCache, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, head_k_dim: int
    ) -> None:
        """Computes out [T, Hv, Dv] from the inputs of `GatedDeltaNetSpec` of T rows, in bf16 or fp16.

        states: conv [num_slots, C, W - 1] in the inputs' dtype, ssm [num_slots, Hv, Dk, Dv] fp32.
        """
        qkv, b, a, conv_weight, a_log, dt_bias = inputs
        assert states.conv is not None
        assert states.ssm is not None
        if self._step is not step:
            self._plan(step)
        live = self._live
        assert live is not None
        num_v_heads, v_dim = out.shape[1:]
        # fla keeps W columns, of which the first is not read.
        conv_state = functional.pad(read_states(states.conv, live), (1, 0))
        mixed, conv_state = self._convolve(
            qkv[None], conv_weight, activation="silu", initial_state=conv_state, output_final_state=True,
            **self._offsets,
        )  # fmt: skip
        key_size = (qkv.shape[1] - num_v_heads * v_dim) // 2
        q, k, v = torch.split(mixed, [key_size, key_size, num_v_heads * v_dim], dim=2)
        result, state = self._apply_rule(
            q.view(1, -1, key_size // head_k_dim, head_k_dim), k.view(1, -1, key_size // head_k_dim, head_k_dim),
            v.view(1, -1, num_v_heads, v_dim),
            g=-a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())[None],
            beta=b.sigmoid()[None], initial_state=read_states(states.ssm, live), output_final_state=True,
            use_qk_l2norm_in_kernel=True, **self._offsets,
        )  # fmt: skip
        out.copy_(result[0])
        write_states(states.conv, live, conv_state[:, :, 1:])
        write_states(states.ssm, live, state)
        if self._empty is not None:
            for tensor in (states.conv, states.ssm):
                write_states(tensor, self._empty, read_states(tensor, self._empty))

    def _plan(self, step: StateStep) -> None:
        """Makes the offsets and the live sequences of a step, once for all its layers."""
        device, bounds = step.read_slots.device, step.bounds
        rows = [i for i in range(len(bounds) - 1) if bounds[i] < bounds[i + 1]]
        # New tensors for every step: fla caches what it derives from them by their identity.
        host = torch.tensor([bounds[i] for i in rows] + [bounds[-1]], dtype=torch.int64)
        self._offsets = {"cu_seqlens": host.to(device, non_blocking=True), "cu_seqlens_cpu": host}
        self._step, self._live, self._empty = step, step, None
        if len(rows) < len(bounds) - 1:
            self._live = _of_rows(step, rows)
            self._empty = _of_rows(step, [i for i in range(len(bounds) - 1) if bounds[i] == bounds[i + 1]])


def _of_rows(step: StateStep, rows: list[int]) -> StateStep:
    """Some sequences of a step."""
    index = torch.tensor(rows, dtype=torch.int64).to(step.read_slots.device, non_blocking=True)
    slots = (step.read_slots[index], step.write_slots[index], step.has_initial[index])
    return StateStep(step.decode, *slots, step.bounds)
