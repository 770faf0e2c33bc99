"""The gated MLP: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..ops import gelu_and_mul, silu_and_mul
from .linear import MergedColumnParallelLinear, RowParallelLinear
from .parallel import TensorParallel
from .prefetch import PrefetchingModule

_GATED_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": partial(gelu_and_mul, approximate="none"),
    "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
}


class GatedMLP(PrefetchingModule):
    """x [T, hidden] -> [T, hidden]. `reduce_results` as in `RowParallelLinear`. An unknown activation: ValueError."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        bias: bool = False,
        reduce_results: bool = True,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        if hidden_act not in _GATED_ACTIVATIONS:
            raise ValueError(f"hidden_act {hidden_act!r} is not supported; supported: {sorted(_GATED_ACTIVATIONS)}")
        tp.shard("intermediate_size", intermediate_size)  # an error names the config's key
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias=bias, tp=tp)
        self.activation = _GATED_ACTIVATIONS[hidden_act]
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, reduce_results=reduce_results, tp=tp
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.gate_up_proj(x), prefetch=self.next_weight)
        out: torch.Tensor = self.down_proj(inner)
        return out
