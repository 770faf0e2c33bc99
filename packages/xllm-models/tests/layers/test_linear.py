"""Sharded linear layers against one nn.Linear: what the ranks hold, put together, is the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from xllm_models import DictStateDict, TensorParallel, WeightMap
from xllm_models.layers import ColumnParallelLinear, GatedMLP, QKVParallelLinear, RowParallelLinear
from xllm_models.loading import load_weights


def load(layer: nn.Module, tensors: dict[str, torch.Tensor], fused: dict[str, tuple[str, ...]]) -> None:
    holder = nn.ModuleDict({"layer": layer}).requires_grad_(False)
    load_weights(holder, WeightMap(fused=fused), [DictStateDict(tensors)], tied=False)


def named(linear: nn.Linear, name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": value for key, value in linear.state_dict().items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_shards_joined_are_the_whole(size: int, bias: bool) -> None:
    whole, x = nn.Linear(6, 8, bias=bias).requires_grad_(False), torch.randn(3, 6)
    outputs = []
    for rank in range(size):
        layer = ColumnParallelLinear(6, 8, bias=bias, tp=TensorParallel(rank=rank, size=size))
        load(layer, named(whole, "layer"), {})
        outputs.append(layer(x))
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole(x))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_shards_cut_the_inputs(size: int) -> None:
    whole, x = nn.Linear(8, 6, bias=False).requires_grad_(False), torch.randn(3, 8)
    total = torch.zeros(3, 6)
    for part, rank in zip(x.chunk(size, dim=1), range(size), strict=True):
        layer = RowParallelLinear(8, 6, tp=TensorParallel(rank=rank, size=size))
        load(layer, named(whole, "layer"), {})
        total += part @ layer.weight.T
    torch.testing.assert_close(total, whole(x))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv_gives_each_rank_its_heads(size: int) -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 3
    torch.manual_seed(0)
    rows = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    wholes = {name: nn.Linear(6, n * head_dim).requires_grad_(False) for name, n in rows.items()}
    tensors = {key: value for name, whole in wholes.items() for key, value in named(whole, f"{name}_proj").items()}
    x = torch.randn(5, 6)
    want = {name: whole(x).view(5, -1, head_dim) for name, whole in wholes.items()}
    for rank in range(size):
        tp = TensorParallel(rank=rank, size=size)
        layer = QKVParallelLinear(6, head_dim, num_heads, num_kv_heads, bias=True, tp=tp)
        load(layer, tensors, {"layer": ("q_proj", "k_proj", "v_proj")})
        q, k, v = layer(x)
        heads = slice(rank * num_heads // size, (rank + 1) * num_heads // size)
        first = rank * num_kv_heads // size
        kv = slice(first, first + max(1, num_kv_heads // size))
        for got, name, region in ((q, "q", heads), (k, "k", kv), (v, "v", kv)):
            torch.testing.assert_close(got, want[name][:, region])


def test_layers_take_no_rows() -> None:
    tp = TensorParallel()
    q, k, v = QKVParallelLinear(6, 3, 4, 2, tp=tp).requires_grad_(False)(torch.empty(0, 6))
    assert (q.shape, k.shape, v.shape) == ((0, 4, 3), (0, 2, 3), (0, 2, 3))
    mlp = GatedMLP(6, 8, hidden_act="silu", tp=tp).requires_grad_(False)
    assert mlp(torch.empty(0, 6)).shape == (0, 6)


def test_a_weight_map_that_does_not_fit_the_layer_is_named() -> None:
    layer = QKVParallelLinear(6, 3, 4, 2, tp=TensorParallel())
    with pytest.raises(
        ValueError, match=r"layer\.weight has 3 weight shards, but the weight map names \['a\.weight', 'b\.weight'\]"
    ):
        load(layer, {}, {"layer": ("a", "b")})


def test_shards_of_a_dimension_meet_without_gap_or_overlap() -> None:
    cuts = [TensorParallel(rank=rank, size=4).shard("rows", 12) for rank in range(4)]
    assert all(left.start + left.size == right.start for left, right in pairwise(cuts))
    assert (cuts[0].start, cuts[-1].start + cuts[-1].size) == (0, 12)
