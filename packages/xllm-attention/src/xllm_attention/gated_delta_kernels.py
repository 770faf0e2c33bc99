"""A decode step of Gated DeltaNet in two Triton kernels: the causal convolution, then the delta rule.

Owns the kernels and their launch. Both read and write the state slots in place; rows without a slot read zeros and
write nothing. Sums, norms and the state are fp32. B rows, C channels, W taps, Hk and Hv key and value heads, Dk and Dv
elements of a key and a value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .state import StateStep
from .triton_launch import KeyedLauncher, alignment

# Channels of a program of the convolution, and columns of the state of a program of the delta rule. On an H200 at
# Qwen3-Next's sizes, 100 rows take 226, 138, 121 and 124 us with 16, 32, 64 and 128 columns, and one row 6.6, 6.5, 6.6
# and 8.0; 128, 256 and 512 channels are equal. Measured with benchmarks/layers.py.
CONV_BLOCK = 256
STATE_BLOCK = 64


class GatedDeltaDecode:
    """Launches both kernels for a decode step; keeps their compiled variants."""

    def __init__(self) -> None:
        self._conv = KeyedLauncher(conv_kernel)
        self._rule = KeyedLauncher(delta_rule_kernel)

    def __call__(
        self,
        step: StateStep,
        conv: torch.Tensor,
        ssm: torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        out: torch.Tensor,
    ) -> None:
        """Computes out [B, Hv, Dv] from the inputs of `GatedDeltaNetSpec`, of which the first three have B rows.

        conv [num_slots, C, W - 1] in the inputs' dtype, ssm [num_slots, Hv, Dk, Dv] fp32.
        """
        qkv, b, a, conv_weight, a_log, dt_bias = inputs
        num_rows, num_channels = qkv.shape
        _, num_v_heads, k_dim, v_dim = ssm.shape
        num_k_heads = (num_channels - num_v_heads * v_dim) // (2 * k_dim)
        num_taps = conv_weight.shape[1]
        slots = (step.read_slots, step.write_slots, step.has_initial)
        mixed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        constants = {
            "X_STRIDES": qkv.stride(),
            "CONV_STRIDES": conv.stride(),
            "WEIGHT_STRIDES": conv_weight.stride(),
            "C": num_channels,
            "W": num_taps,
            "W_PAD": triton.next_power_of_2(num_taps),
            "BLOCK": CONV_BLOCK,
        }
        key = (*constants.values(), qkv.dtype, *alignment(qkv, conv, conv_weight, mixed, *slots))
        grid = (num_rows, triton.cdiv(num_channels, CONV_BLOCK), 1)
        self._conv(key, grid, (qkv, conv, conv_weight, mixed, *slots), constants, {"num_warps": 4})
        constants = {
            "B_STRIDES": b.stride(),
            "A_STRIDES": a.stride(),
            "OUT_STRIDES": out.stride(),
            "SSM_STRIDES": ssm.stride(),
            "scale": k_dim**-0.5,
            "C": num_channels,
            "HK": num_k_heads,
            "HV": num_v_heads,
            "DK": k_dim,
            "DV": v_dim,
            "DK_PAD": triton.next_power_of_2(k_dim),
            "BLOCK": min(STATE_BLOCK, triton.next_power_of_2(v_dim)),
        }
        key = (*constants.values(), qkv.dtype, a_log.dtype, *alignment(mixed, b, a, a_log, dt_bias, ssm, out, *slots))
        grid = (num_rows, num_v_heads, triton.cdiv(v_dim, constants["BLOCK"]))
        self._rule(key, grid, (mixed, b, a, a_log, dt_bias, ssm, out, *slots), constants, {"num_warps": 4})


@triton.jit  # type: ignore[untyped-decorator]
def conv_kernel(
    x_ptr: tl.tensor, conv_ptr: tl.tensor, weight_ptr: tl.tensor, mixed_ptr: tl.tensor, read_ptr: tl.tensor,
    write_ptr: tl.tensor, initial_ptr: tl.tensor,
    X_STRIDES: tl.constexpr, CONV_STRIDES: tl.constexpr, WEIGHT_STRIDES: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """mixed [B, C] = silu(convolution of the last W - 1 rows and x [B, C]); shifts the rows of the state by one."""
    conv_stride_slot, conv_stride_channel, conv_stride_tap = CONV_STRIDES[0], CONV_STRIDES[1], CONV_STRIDES[2]
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    tap = tl.arange(0, W_PAD)[None, :]
    read = tl.where(tl.load(initial_ptr + row), tl.load(read_ptr + row), -1).to(tl.int64)  # -1: the state is 0
    write = tl.load(write_ptr + row).to(tl.int64)
    exists = (channel < C) & (tap < W)
    readable = tl.where(read >= 0, C, 0)  # channels; the interpreter takes no scalar mask
    writable = tl.where(write >= 0, C, 0)
    state = channel * conv_stride_channel + tap * conv_stride_tap
    old = tl.load(conv_ptr + read * conv_stride_slot + state, mask=(channel < readable) & (tap < W - 1), other=0.0)
    x = tl.load(x_ptr + row * X_STRIDES[0] + channel * X_STRIDES[1], mask=channel < C, other=0.0)
    window = tl.where(tap == W - 1, x, old)
    weight = tl.load(weight_ptr + channel * WEIGHT_STRIDES[0] + tap * WEIGHT_STRIDES[1], mask=exists, other=0.0)
    total = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 1)
    # The model's dtype rounds the convolution and its activation, as two layers do.
    rounded = total.to(x_ptr.dtype.element_ty).to(tl.float32)
    result = rounded / (1.0 + tl.exp(-rounded))
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mixed_ptr + row * C + channels, result.to(mixed_ptr.dtype.element_ty), mask=channels < C)
    # The slots that are read and written may be one: all loads come before the first store.
    tl.debug_barrier()
    target = conv_ptr + write * conv_stride_slot + state - conv_stride_tap
    tl.store(target, window, mask=(channel < writable) & (tap > 0) & (tap < W))


@triton.jit  # type: ignore[untyped-decorator]
def delta_rule_kernel(
    mixed_ptr: tl.tensor, b_ptr: tl.tensor, a_ptr: tl.tensor, a_log_ptr: tl.tensor, dt_bias_ptr: tl.tensor,
    ssm_ptr: tl.tensor, out_ptr: tl.tensor, read_ptr: tl.tensor, write_ptr: tl.tensor, initial_ptr: tl.tensor,
    B_STRIDES: tl.constexpr, A_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr, SSM_STRIDES: tl.constexpr,
    scale: tl.constexpr, C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of one head's state of one row: decays it, adds the correction, and multiplies it by the query."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    read = tl.where(tl.load(initial_ptr + row), tl.load(read_ptr + row), -1).to(tl.int64)  # -1: the state is 0
    write = tl.load(write_ptr + row).to(tl.int64)
    k_element = tl.arange(0, DK_PAD)
    v_element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_mask, v_mask = k_element < DK, v_element < DV
    heads = mixed_ptr + row * C
    k_head = head // (HV // HK)
    q = tl.load(heads + k_head * DK + k_element, mask=k_mask, other=0.0).to(tl.float32)
    k = tl.load(heads + (HK + k_head) * DK + k_element, mask=k_mask, other=0.0).to(tl.float32)
    v = tl.load(heads + 2 * HK * DK + head * DV + v_element, mask=v_mask, other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)

    b = tl.load(b_ptr + row * B_STRIDES[0] + head * B_STRIDES[1]).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-b))).to(b_ptr.dtype.element_ty).to(tl.float32)
    a = tl.load(a_ptr + row * A_STRIDES[0] + head * A_STRIDES[1]).to(tl.float32)
    a += tl.load(dt_bias_ptr + head).to(tl.float32)
    # log(1 + exp(a)), which overflows for no a.
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * softplus)

    # Elements of a key; the interpreter takes no scalar mask.
    readable = (k_element < tl.where(read >= 0, DK, 0))[:, None] & v_mask[None, :]
    writable = (k_element < tl.where(write >= 0, DK, 0))[:, None] & v_mask[None, :]
    offsets = head * SSM_STRIDES[1] + (k_element.to(tl.int64) * SSM_STRIDES[2])[:, None]
    offsets += (v_element.to(tl.int64) * SSM_STRIDES[3])[None, :]
    state = tl.load(ssm_ptr + read * SSM_STRIDES[0] + offsets, mask=readable, other=0.0) * decay
    delta = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * delta[None, :]
    result = tl.sum(q[:, None] * state, 0)
    out = out_ptr + row * OUT_STRIDES[0] + head * OUT_STRIDES[1] + v_element * OUT_STRIDES[2]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=v_mask)
    tl.store(ssm_ptr + write * SSM_STRIDES[0] + offsets, state, mask=writable)
