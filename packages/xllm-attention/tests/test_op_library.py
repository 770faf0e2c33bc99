"""Ops defined from typed functions: their schemas, fakes, kernels, and the registry of collectives."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from xllm_attention.op_library import collective_ops, define_op


@define_op()
def op_test_swap(x: torch.Tensor, y: torch.Tensor, scale: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results."""
    return y * scale, x * scale


@define_op(mutates=["out"], tags=[torch.Tag.cudagraph_unsafe], collective=True)
def _op_test_write_(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    out.copy_(x if bias is None else x + bias)


def _halve_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0] // 2)


@define_op(fake=_halve_fake, kernels={"CPU": lambda x: x[: x.shape[0] // 2] + 1})
def op_test_halve(x: torch.Tensor) -> torch.Tensor:
    return x[: x.shape[0] // 2].clone()


def test_the_schema_is_the_function_s() -> None:
    assert str(torch.ops.xllm.op_test_swap.default._schema) == (
        "xllm::op_test_swap(Tensor x, Tensor y, int scale=1) -> (Tensor, Tensor)"
    )
    assert str(torch.ops.xllm.op_test_write_.default._schema) == (
        "xllm::op_test_write_(Tensor x, Tensor(a1!) out, Tensor? bias=None) -> ()"
    )
    assert torch.Tag.cudagraph_unsafe in torch.ops.xllm.op_test_write_.default.tags


def test_the_decorator_returns_the_overload() -> None:
    assert op_test_swap is torch.ops.xllm.op_test_swap.default
    assert op_test_swap.__doc__ == "Two results."
    x, y = op_test_swap(torch.ones(2), torch.zeros(3), scale=2)
    assert (x.tolist(), y.tolist()) == ([0] * 3, [2] * 2)


def test_schemas_and_fakes_hold() -> None:
    x, y = torch.randn(4), torch.randn(4)
    torch.library.opcheck(torch.ops.xllm.op_test_swap.default, (x, y, 3))
    torch.library.opcheck(torch.ops.xllm.op_test_write_.default, (x, y))
    torch.library.opcheck(torch.ops.xllm.op_test_halve.default, (x,))


def test_a_result_has_by_default_the_metadata_of_the_argument_at_its_index() -> None:
    with FakeTensorMode():
        first, second = op_test_swap(torch.zeros(2, 3).t(), torch.zeros(5, dtype=torch.bfloat16))
        assert _op_test_write_(torch.zeros(1), torch.zeros(1)) is None  # type: ignore[func-returns-value]
    assert (first.shape, first.is_contiguous(), first.dtype) == ((3, 2), True, torch.float32)
    assert (second.shape, second.dtype) == ((5,), torch.bfloat16)


def test_a_device_s_kernel_is_preferred() -> None:
    assert op_test_halve(torch.zeros(4)).tolist() == [1, 1]
    assert op_test_halve(torch.zeros(4, device="meta")).shape == (2,)


def test_collectives_are_registered_by_qualified_name() -> None:
    assert "xllm::op_test_write_" in collective_ops()
    assert not {"xllm::op_test_swap", "xllm::attention"} & collective_ops()


def test_a_function_without_annotations_is_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(ValueError, match="Parameter x must have a type annotation"):
        define_op()(untyped)
