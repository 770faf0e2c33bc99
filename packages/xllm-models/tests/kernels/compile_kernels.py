"""Compiles every kernel for sm_90 in bf16, at model shapes. No GPU is needed, so CI sees what only a compiler sees.

A script of its own: `test_kernels` runs it in a process where Triton does not interpret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xllm_models.kernels import (
    activation,
    embedding,
    lamport_all_reduce,
    linear,
    moe,
    moe_align,
    norm,
    rotary,
    symmetric_all_gather,
)
from xllm_models.kernels.block_sizes import power_of_two
from xllm_models.kernels.symmetric_buffers import SUM_CHUNK_BYTES

TARGET = GPUTarget("cuda", 90, 32)
B, F, I = "*bf16", "*fp32", "*i32"  # noqa: E741

Case = tuple[Any, list[str], list[Any], dict[str, int]]  # kernel, types of its arguments, its constants, options


def cases() -> Iterator[Case]:
    for residual in (False, True):
        for unit_offset in (False, True):
            constants = [1024, 1024, 1024, 1024, residual, unit_offset]
            types = [B, B, B, B, B, B, "i32", "i32", "fp32"]
            yield norm._launch._kernel, types, [*constants, 128], {"num_warps": 4}
    for function in ("silu", "tanh", "none"):
        constants = [6144, 3072, 1024, function]
        yield activation._launch._kernel, [B, B, B, "i32", "i32"], constants, {"num_warps": 4}
    for ids in (I, "*i64"):
        constants = [1024, 1, 1024, 1024]
        yield embedding._launch._kernel, [ids, B, B, "i32", "i32", "i32"], constants, {"num_warps": 4}
    rotary_types = [B, B, B, B, I, F, B, B, "fp32"]
    for norm_kind, half, pairs, rest in (
        ("none", 64, (1, 64), 0),
        ("none", 32, (2, 1), 64),
        ("weight", 64, (1, 64), 0),
        ("unit_offset", 64, (1, 64), 0),
        ("weight", 32, (1, 32), 64),
        ("weight", 64, (2, 1), 0),
    ):
        constants = [4096, 128, 4096, 128, 16, 8, 128, half, *pairs, 4, power_of_two(half), rest, norm_kind]
        yield rotary._rotary_kernel, rotary_types, constants, {"num_warps": 2}
    for ranks in (2, 8):
        for chunk in SUM_CHUNK_BYTES:
            buffer = [1, ranks, 0, 128 * chunk, chunk]
            for dtype, size in ((B, 2), (F, 4)):
                options = {"num_warps": min(chunk // 512, 16)}
                constants = [*buffer, chunk // size, 16 // size]
                yield lamport_all_reduce._launch_all_reduce._kernel, [dtype, "*i64", I, "i32"], constants, options
                for unit_offset in (False, True):
                    types = [dtype, dtype, dtype, dtype, dtype, "*i64", I, dtype, *["i32"] * 4, "fp32"]
                    constants = [*buffer, 1024, 1024, unit_offset, 128]
                    yield lamport_all_reduce._launch_all_reduce_norm._kernel, types, constants, {"num_warps": 4}
        constants = [1, ranks, 0, 128 * 147456, 147456, 1024]
        yield symmetric_all_gather._launch._kernel, [I, I, "*i64", I, *["i32"] * 3], constants, {"num_warps": 16}
    for bias in (False, True):
        yield linear._vector_kernel, [B, B, B, B], [1024, 4096, 1024, 2, 1024, bias], {"num_warps": 4}
        for rows in (8, 16):
            for num_outputs in (1024, 4096):
                block_n, block_k, split, stages = linear.few_rows_tiles(num_outputs)
                constants = [2048, 2048, num_outputs, 2048, rows, block_n, block_k, split, bias, "tf32"]
                options = {"num_warps": split, "num_stages": stages}
                yield linear._launch_rows._kernel, [B, B, B, B, "i32"], constants, options
    yield moe_align._topk_softmax_kernel, [B, B, I], [128, 128, 8, True, 128, 8], {"num_warps": 1}
    for pairs, experts in ((8, 128), (1, 1), (1024, 128), (13, 5)):
        count = pairs // 16 + min(pairs, experts)
        constants = [pairs, experts, count, 16, power_of_two(pairs), power_of_two(experts + 1), power_of_two(count)]
        yield moe_align._align_kernel, [I] * 5, constants, {"num_warps": 8}
    yield moe._combine_kernel, [B, B], [1024, 8, 512], {"num_warps": 4}
    for rows in (16, 64):
        constants = [1024, 128, 1024, 768, 8, rows, 64, 64, "tf32"]
        for bias in (False, True):
            yield moe._gate_up_kernel, [B, B, I, I, I, I, B, B], [*constants, bias, bias, 1.702, 7.0], {"num_warps": 4}
            down = [128, 1024, 768, rows, 64, 64, "tf32", bias]
            yield moe._down_kernel, [B, B, B, I, I, I, I, B, B], down, {"num_warps": 4}


def compile_case(kernel: Any, types: list[str], constants: list[Any], options: dict[str, int]) -> None:
    """As a launch would: pointers aligned to 16 bytes."""
    given, fixed = iter(types), iter(constants)
    signature = {p.name: "constexpr" if p.is_constexpr else next(given) for p in kernel.params}
    constexprs = {p.name: p.name == "OVERLAP" or next(fixed) for p in kernel.params if p.is_constexpr}
    pointers = [index for index, dtype in enumerate(signature.values()) if dtype.startswith("*")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=options).asm
    assert compiled["cubin"]
    if (
        kernel is rotary._rotary_kernel and constexprs["PAIR_STRIDE"] == 1
    ):  # all that it loads has the shape it is used in
        assert "bar.sync" not in compiled["ptx"]
    if kernel.__name__ == "_rows_kernel":
        # The batch dimension of a product is the slowest one in shared memory. Where it is not, the rows that one
        # ldmatrix reads fall into one bank.
        orders = re.findall(r"swizzled_shared<.*order = \[([^]]*)\]", compiled["ttgir"])
        assert orders, "the operands do not go through shared memory"
        assert all(order.endswith(" 0") for order in orders), f"shared memory orders {orders}"
    before, wait, _ = compiled["ptx"].partition("griddepcontrol.wait")
    assert bool(wait) == ("OVERLAP" in constexprs), kernel.__name__
    assert not wait or not re.search(r"\b(ld|st|atom|red)\.global", before), f"{kernel.__name__} does not wait first"


if __name__ == "__main__":
    compiled = set()
    for case in cases():
        compile_case(*case)
        compiled.add(case[0].__name__)
    print(" ".join(sorted(compiled)))
