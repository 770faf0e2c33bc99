"""An out-of-tree model and attention backend that write down every address and call they see.

A host loads it through its module path; the record goes to the file that the environment variable
XLLM_RECORD names, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from xllm_attention import Step
from xllm_attention.backends.torch_backend import TorchBackend
from xllm_metadata import FIELDS
from xllm_models.models.llama import LlamaForCausalLM


def record(**fields: Any) -> None:
    with open(os.environ["XLLM_RECORD"], "a") as file:
        file.write(json.dumps(fields) + "\n")


def address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class RecorderForCausalLM(LlamaForCausalLM):
    """Llama; records its inputs."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        record(event="forward", tokens=address(input_ids), positions=address(positions))
        return super().forward(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
        record(event="logits", logits_indices=address(indices))
        return super().compute_logits(hidden, indices)


class RecorderBackend(TorchBackend):
    """The torch backend; records caches and metadata, and reads the view of the step before."""

    name = "recorder"
    _last: Any = None

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        record(event="bind", caches=[[k.data_ptr(), v.data_ptr()] for k, v in caches])
        record(event="environment", prefix=sys.prefix, torch=torch.__file__, executable=sys.executable)
        super()._bind(caches, page_size)

    def _plan_step(self, step: Step) -> None:
        metadata = step.metadata
        kept = None
        if self._last is not None:
            try:
                _ = self._last.slot_mapping
            except RuntimeError as error:
                kept = str(error)
        self._last = metadata
        same = metadata.q_cu_seq_lens is metadata.qo_indptr
        values = {field.name: address(getattr(metadata, field.name)) for field in FIELDS}
        record(event="plan", kept_view=kept, alias_is_same=same, type=type(metadata).__name__, **values)
        super()._plan_step(step)
