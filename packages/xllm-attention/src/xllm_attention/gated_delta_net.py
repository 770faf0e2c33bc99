"""`GatedDeltaNetSpec`: causal convolution and gated delta rule (arXiv:2412.06464), as Qwen3-Next has them.

Owns the formula in PyTorch ops. On a CUDA device, decode steps run in Triton kernels (`gated_delta_kernels`). Other
steps run in those of flash-linear-attention where fla-core is installed (`gated_delta_prefill`). T rows of the step, B
sequences, C channels, W taps of the convolution, Hk key heads, Hv value heads, Dk and Dv elements of a key and a value
head.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as cache_results
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from xllm_metadata import CacheSpec, LayerCache

from .state import StateSpec, StateStep, read_states, write_states

if TYPE_CHECKING:
    from .gated_delta_kernels import GatedDeltaDecode
    from .gated_delta_prefill import GatedDeltaPrefill

CHUNK = 64  # rows that one triangular system covers
_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetSpec(StateSpec):
    """One layer's states and formula. Heads are those of this rank.

    Per value head h with key head h // (Hv / Hk), for each row in order, with S the state [Dk, Dv]:

        S = exp(g) * S
        S = S + k (beta * (v - k S))^T
        out = q S / sqrt(Dk)

    q, k, v are the rows of silu(conv(qkv)), a causal depthwise convolution over the sequence; q and k are then divided
    by their L2 norms. beta = sigmoid(b) and g = -exp(A_log) * softplus(a + dt_bias).

    `StateLayer` takes the inputs qkv [T, C] (all q heads, all k heads, all v heads), b [T, Hv], a [T, Hv], conv_weight
    [C, W], A_log [Hv], dt_bias [Hv], and gives [T, Hv, Dv].

    Attributes:
        num_k_heads: query and key heads; divides num_v_heads.
        num_v_heads: value heads.
        head_k_dim, head_v_dim: elements of a head.
        conv_kernel_size: W.

    Raises:
        ValueError: names the attribute, its value and the limit.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.conv_kernel_size < 2:
            raise ValueError(f"conv_kernel_size is {self.conv_kernel_size}; it must be at least 2")
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads is {self.num_v_heads}; it must be a multiple of num_k_heads, {self.num_k_heads}"
            )

    @property
    def num_channels(self) -> int:
        """C: the elements of all q, k and v heads."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """conv [C, W - 1] in the model's dtype, and ssm [Hv, Dk, Dv] in fp32 (fp64 for a model in fp64)."""
        return (
            CacheSpec("conv", (self.num_channels, self.conv_kernel_size - 1), dtype),
            CacheSpec("ssm", (self.num_v_heads, self.head_k_dim, self.head_v_dim), _state_dtype(dtype)),
        )

    def run(self, step: StateStep, cache: LayerCache, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """See `StateSpec.run`; the inputs are those of the class."""
        assert cache.conv is not None  # checked at binding
        assert cache.ssm is not None
        num_seqs = step.read_slots.shape[0]
        num_rows = num_seqs if step.decode else step.bounds[-1]
        if num_rows < out.shape[0]:
            out[num_rows:].zero_()
        if num_seqs == 0:
            return
        live = tuple(tensor[:num_rows] for tensor in inputs[:3])
        live_inputs, live_out = (*live, *inputs[3:]), out[:num_rows]
        if out.is_cuda and step.decode and cache.ssm.dtype is torch.float32 and (decode := _decode_kernels()):
            decode(step, cache.conv, cache.ssm, live_inputs, live_out)
        elif out.is_cuda and not step.decode and num_rows and out.dtype.itemsize == 2 and (prefill := _fla_prefill()):
            prefill(step, cache, live_inputs, live_out, self.head_k_dim)
        else:
            self.run_formula(step, cache, live_inputs, live_out)

    def run_formula(
        self, step: StateStep, cache: LayerCache, inputs: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """`run` in PyTorch ops, for at least one sequence and inputs and out without padding rows."""
        qkv, b, a, conv_weight, a_log, dt_bias = inputs
        assert cache.conv is not None
        assert cache.ssm is not None
        high = cache.ssm.dtype
        beta = b.sigmoid().to(high)  # rounded to the model's dtype, as in HF
        log_decay = -a_log.to(high).exp() * functional.softplus(a.to(high) + dt_bias.to(high))
        conv_state, state = read_states(cache.conv, step), read_states(cache.ssm, step)
        if step.decode:
            window = torch.cat((conv_state, qkv[:, :, None]), dim=2)  # [B, C, W]
            mixed = (window.to(high) * conv_weight.to(high)).sum(dim=2)
            result, state = self._recurrent(self._heads(mixed, out.dtype), beta, log_decay, state)
            out.copy_(result)
            conv_state = window[:, :, 1:]
        else:
            conv_states, states = list(conv_state), list(state)
            for i, (start, stop) in enumerate(pairwise(step.bounds)):
                if start == stop:
                    continue
                rows = slice(start, stop)
                window = torch.cat((conv_states[i], qkv[rows].T), dim=1)  # [C, W - 1 + rows]
                mixed = functional.conv1d(
                    window.to(high)[None], conv_weight.to(high)[:, None], groups=self.num_channels
                )[0].T
                heads = self._heads(mixed, out.dtype)
                result, states[i] = self._chunked(heads, beta[rows], log_decay[rows], states[i])
                out[rows] = result.to(out.dtype)
                conv_states[i] = window[:, 1 - self.conv_kernel_size :]
            conv_state, state = torch.stack(conv_states), torch.stack(states)
        write_states(cache.conv, step, conv_state)
        write_states(cache.ssm, step, state)

    def _heads(self, mixed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [n, Hv, Dk] and v [n, Hv, Dv] of convolved rows [n, C]; normalized, and q scaled, in the dtype given.

        The convolution's result is rounded to the model's `dtype`, as where it is a layer of its own.
        """
        high = mixed.dtype
        mixed = functional.silu(mixed.to(dtype)).to(high)
        key_size = self.num_k_heads * self.head_k_dim
        q, k, v = torch.split(mixed, [key_size, key_size, self.num_v_heads * self.head_v_dim], dim=1)
        group_size = self.num_v_heads // self.num_k_heads
        q, k = (
            (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)).repeat_interleave(group_size, dim=1)
            for x in (y.reshape(-1, self.num_k_heads, self.head_k_dim) for y in (q, k))
        )
        return q * self.head_k_dim**-0.5, k, v.reshape(-1, self.num_v_heads, self.head_v_dim)

    @staticmethod
    def _recurrent(
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        beta: torch.Tensor,
        log_decay: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One row per sequence: (out [B, Hv, Dv], new state [B, Hv, Dk, Dv])."""
        q, k, v = heads
        state = state * log_decay.exp()[..., None, None]
        delta = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * beta[..., None]
        state = state + k[..., :, None] * delta[..., None, :]
        return torch.einsum("bhk,bhkv->bhv", q, state), state

    @staticmethod
    def _chunked(
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        beta: torch.Tensor,
        log_decay: torch.Tensor,
        state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """n rows of one sequence, chunk by chunk: (out [n, Hv, Dv], new state [Hv, Dk, Dv]).

        With c the cumulative sum of g in a chunk, row i adds k_i u_i^T to the state, where u solves the unit lower
        triangular system u_i + beta_i sum_{j<i} exp(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - exp(c_i) k_i S).
        """
        outputs = []
        for begin in range(0, beta.shape[0], CHUNK):
            q, k, v = (x[begin : begin + CHUNK].transpose(0, 1) for x in heads)  # [Hv, n, D]
            weight = beta[begin : begin + CHUNK].T[..., None]  # [Hv, n, 1]
            total = log_decay[begin : begin + CHUNK].T.cumsum(dim=1)  # [Hv, n]
            n = total.shape[1]
            later = torch.ones(n, n, dtype=torch.bool, device=total.device).triu(1)
            # exp(c_i - c_j) where j <= i. Masked before exp, which overflows for later rows.
            decay = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
            grown = total.exp()[..., None]
            system = weight * (k @ k.mT) * decay
            added = torch.linalg.solve_triangular(
                system, weight * (v - grown * (k @ state)), upper=False, unitriangular=True
            )
            outputs.append(grown * (q @ state) + ((q @ k.mT) * decay) @ added)
            rest = (total[:, -1:] - total).exp()[..., None]
            state = total[:, -1].exp()[:, None, None] * state + (k * rest).mT @ added
        return torch.cat(outputs, dim=1).transpose(0, 1), state


@cache_results
def _decode_kernels() -> GatedDeltaDecode | None:
    """The Triton kernels of decode steps; None where Triton is not installed."""
    try:
        from .gated_delta_kernels import GatedDeltaDecode
    except ImportError:
        return None
    return GatedDeltaDecode()


@cache_results
def _fla_prefill() -> GatedDeltaPrefill | None:
    """Steps with several rows per sequence in fla's kernels; None where fla-core is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportWarning)  # that flash-attn, which other parts of fla use, is absent
            from fla.modules.causal_conv1d import causal_conv1d
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    from .gated_delta_prefill import GatedDeltaPrefill

    return GatedDeltaPrefill(causal_conv1d, chunk_gated_delta_rule)


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
