"""Layers that keep one state per sequence instead of keys and values: their spec, and the layer that models hold.

Owns the reading and writing of state slots for specs made of PyTorch ops. The formula belongs to the spec's subclass,
and the slots' memory to the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from xllm_metadata import CacheSpec, LayerCache

from .ops import state_layer


class StateStep(NamedTuple):
    """One step, as a `StateSpec` gets it. B sequences, padding included."""

    decode: bool  # row i belongs to sequence i, and shapes depend on B only
    read_slots: torch.Tensor  # [B] int32, device: slots of the states before the step; -1: none
    write_slots: torch.Tensor  # [B] int32, device: slots of the states after it; -1: nothing is written
    has_initial: torch.Tensor  # [B] bool, device: whether the read slot holds a state; else the state is 0
    bounds: tuple[int, ...]  # [B + 1], host: offsets of each sequence's rows; empty in a decode step


class StateSpec(ABC):
    """What one layer keeps per sequence, and its formula. Subclasses are frozen dataclasses."""

    @abstractmethod
    def cache_specs(self, dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        """The state tensors that the layer needs; `dtype` is that of the model."""

    @abstractmethod
    def run(self, step: StateStep, cache: LayerCache, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Computes the step's rows from the states, and writes the new states.

        Launches work only: it never waits for the device. A decode step may be captured in a full graph: then the
        shapes and the addresses of `step` stay those of the capture.

        Args:
            step: of the planned step.
            cache: the bound state tensors, each [num_slots, ...].
            inputs: as the model gave them to `StateLayer`: tensors [T, ...] of the step's rows first, then weights.
            out: [T, ...]. All of it is written; rows that belong to no live token get 0.
        """


class StateLayer(nn.Module):
    """A layer with state: allocates the output and calls the op. Owns neither weights nor state.

    Args:
        spec: states and formula.
        layer_id: index of the layer in the backend's specs and caches, counted together with the attention layers.
    """

    def __init__(self, spec: StateSpec, layer_id: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_id = layer_id

    def forward(self, inputs: Sequence[torch.Tensor], out_shape: Sequence[int]) -> torch.Tensor:
        """`inputs` as the spec's `run` documents them, the first of T rows -> [T, *out_shape] in its dtype."""
        first = inputs[0]
        out = first.new_empty((first.shape[0], *out_shape))
        state_layer(list(inputs), out, self.layer_id)
        return out

    def extra_repr(self) -> str:
        """What `print(model)` shows of the layer."""
        return f"layer_id={self.layer_id}, {self.spec}"


def read_states(tensor: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The states [B, ...] before the step, from a state tensor [num_slots, ...]; 0 where a sequence has none."""
    states = tensor.index_select(0, step.read_slots.clamp_min(0))
    present = step.has_initial & (step.read_slots >= 0)
    return states.masked_fill(~_broadcast(present, states), 0)


def write_states(tensor: torch.Tensor, step: StateStep, states: torch.Tensor) -> None:
    """Writes states [B, ...] to the step's write slots, in fixed shapes; a slot of -1 is skipped."""
    if states.shape[0] == 0:
        return
    written = step.write_slots >= 0
    rows = torch.arange(states.shape[0], device=tensor.device)
    # An index cannot be left out in a fixed shape. So a row without a slot repeats the first row that has one: two
    # equal writes. If no row has one, all rows write slot 0's own state back.
    rows = torch.where(written, rows, written.int().argmax())
    slots = step.write_slots.index_select(0, rows).clamp_min(0).long()
    any_written = _broadcast(written.any()[None], states)
    values = torch.where(any_written, states.index_select(0, rows).to(tensor.dtype), tensor.index_select(0, slots))
    tensor.index_copy_(0, slots, values)


def _broadcast(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return flags.view(-1, *[1] * (like.dim() - 1))
