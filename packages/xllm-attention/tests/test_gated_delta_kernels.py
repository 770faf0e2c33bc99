"""The decode kernels of Gated DeltaNet in Triton's interpreter against the PyTorch formula, and compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from xllm_attention import GatedDeltaNetSpec, StateStep
from xllm_attention.gated_delta_kernels import GatedDeltaDecode
from xllm_metadata import LayerCache, allocate_caches

NUM_SLOTS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Slots of the rows, and the layer."""

    read: tuple[int, ...]
    write: tuple[int, ...] | None = None  # None: those that are read
    initial: tuple[bool, ...] | None = None  # None: all
    spec: GatedDeltaNetSpec
    dtype: torch.dtype = torch.float32


SMALL = GatedDeltaNetSpec(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=6, conv_kernel_size=4)
CASES = {
    "one row": Case(read=(4,), spec=SMALL),
    "rows in any order": Case(read=(4, 0, 8), spec=SMALL),
    "a new sequence": Case(read=(4, 0), initial=(False, True), spec=SMALL),
    "padding": Case(read=(4, -1, -1), initial=(True, False, False), spec=SMALL),
    "padding alone": Case(read=(-1, -1), initial=(False, False), spec=SMALL),
    "write slots of their own": Case(read=(4, 1), write=(5, -1), spec=SMALL),
    "odd sizes": Case(
        read=(4, 0),
        spec=GatedDeltaNetSpec(num_k_heads=3, num_v_heads=9, head_k_dim=12, head_v_dim=40, conv_kernel_size=3),
    ),
    "two taps": Case(
        read=(1,),
        spec=GatedDeltaNetSpec(num_k_heads=2, num_v_heads=2, head_k_dim=16, head_v_dim=16, conv_kernel_size=2),
    ),
    "many channels": Case(
        read=(1, 2),
        spec=GatedDeltaNetSpec(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=64, conv_kernel_size=4),
    ),
    "fp16": Case(read=(4, 0), spec=SMALL, dtype=torch.float16),
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_decode_step_equals_the_formula(name: str, strided: bool) -> None:
    case = CASES[name]
    spec, num_rows = case.spec, len(case.read)
    random = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(case.dtype)

    heads, channels = spec.num_v_heads, spec.num_channels
    if strided:  # as views of fused projections
        fused = draw(num_rows, channels + 2 * heads + 3)
        qkv, b, a = torch.split(fused[:, 3:], [channels, heads, heads], dim=1)
    else:
        qkv, b, a = draw(num_rows, channels), draw(num_rows, heads), draw(num_rows, heads)
    inputs = (qkv, b, a, draw(channels, spec.conv_kernel_size), draw(heads), draw(heads))
    (states,) = allocate_caches([spec.cache_specs(case.dtype)], num_pages=1, page_size=1, num_slots=NUM_SLOTS)
    for slot in (*case.read, *(case.write or ())):
        if slot >= 0:
            for _, tensor in states.items():
                tensor[slot] = torch.randn(tensor.shape[1:], generator=random).to(tensor.dtype)
    untouched = set(range(NUM_SLOTS)) - set(case.write or case.read)
    for _, tensor in states.items():
        tensor[list(untouched - set(case.read))] = torch.nan
    initial = case.initial or (True,) * num_rows
    for slot, present in zip(case.read, initial, strict=True):
        if slot >= 0 and not present:
            for _, tensor in states.items():
                tensor[slot] = torch.nan
    step = StateStep(
        decode=True,
        read_slots=torch.tensor(case.read, dtype=torch.int32),
        write_slots=torch.tensor(case.write or case.read, dtype=torch.int32),
        has_initial=torch.tensor(initial),
        bounds=(),
    )
    expected_states = LayerCache(**{slot: tensor.clone() for slot, tensor in states.items()})
    expected = torch.full((num_rows, heads, spec.head_v_dim), torch.nan, dtype=case.dtype)
    spec.run(step, expected_states, inputs, expected)
    out = torch.full_like(expected, torch.nan)
    assert states.conv is not None
    assert states.ssm is not None
    GatedDeltaDecode()(step, states.conv, states.ssm, inputs, out)
    tolerance = 2e-3 if case.dtype is torch.float16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for (_, tensor), (_, wanted) in zip(states.items(), expected_states.items(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xllm_attention.gated_delta_kernels import CONV_BLOCK, STATE_BLOCK, conv_kernel, delta_rule_kernel

dtype, hk, hv, dk, dv = sys.argv[1], *map(int, sys.argv[2:])
channels = 2 * hk * dk + hv * dv

def build(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared

slots = {"read_ptr": "*i32", "write_ptr": "*i32", "initial_ptr": "*i1"}
rows = {name: "*" + dtype for name in ("x_ptr", "conv_ptr", "weight_ptr", "mixed_ptr")}
build(conv_kernel, rows | slots,
      {"X_STRIDES": (channels, 1), "CONV_STRIDES": (3 * channels, 3, 1), "WEIGHT_STRIDES": (4, 1), "C": channels,
       "W": 4, "W_PAD": 4, "BLOCK": CONV_BLOCK})
rows = {name: "*" + dtype for name in ("mixed_ptr", "b_ptr", "a_ptr", "a_log_ptr", "dt_bias_ptr", "out_ptr")}
build(delta_rule_kernel, rows | slots | {"ssm_ptr": "*fp32"},
      {"B_STRIDES": (2 * hv, 1), "A_STRIDES": (2 * hv, 1), "OUT_STRIDES": (hv * dv, dv, 1),
       "SSM_STRIDES": (hv * dk * dv, dk * dv, dv, 1), "scale": dk**-0.5, "C": channels, "HK": hk, "HV": hv, "DK": dk,
       "DV": dv, "DK_PAD": triton.next_power_of_2(dk), "BLOCK": STATE_BLOCK})
"""


@pytest.mark.parametrize("shape", [("bf16", 16, 32, 128, 128), ("fp16", 3, 9, 80, 96), ("fp32", 2, 4, 64, 64)], ids=str)
def test_the_kernels_compile_for_a_gpu(shape: tuple[str, int, int, int, int]) -> None:
    """The interpreter accepts what the compiler refuses. In a process of its own: here the kernels are interpreted."""
    subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, shape)], env={**os.environ, "TRITON_INTERPRET": "0"}, check=True
    )
