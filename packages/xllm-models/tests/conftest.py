"""Shared pieces of the tests: checkpoints written by HF transformers, and a paged session that runs our models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from xllm_attention import create_backend, forward_context
from xllm_metadata import LayerCache, build_attention_metadata
from xllm_models import CausalLM

torch.set_num_threads(1)


@dataclass(slots=True, kw_only=True)
class PagedSession:
    """Several sequences on one model, each with its pages; `step` feeds any number of tokens to any of them."""

    model: CausalLM
    num_sequences: int
    max_len: int = 64
    page_size: int = 4
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        pages = -(-self.max_len // self.page_size)
        num_blocks = self.num_sequences * pages
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [order[i * pages : (i + 1) * pages] for i in range(self.num_sequences)]
        self.lengths = [0] * self.num_sequences
        specs = self.model.attention_specs
        caches = [
            LayerCache(
                k=torch.full(shape, float("nan"), dtype=self.model.dtype),
                v=torch.full(shape, float("nan"), dtype=self.model.dtype),
            )
            for shape in ((num_blocks, self.page_size, spec.num_kv_heads, spec.head_dim) for spec in specs)
        ]
        self.backend = create_backend(
            "torch",
            specs,
            device="cpu",
            dtype=self.model.dtype,
            max_num_seqs=self.num_sequences,
            max_num_tokens=self.num_sequences * self.max_len,
            max_model_len=self.max_len,
        )
        self.backend.bind_kv_caches(caches)

    tables: list[list[int]] = field(init=False)
    backend: Any = field(init=False)

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """(sequence, its new tokens) of one step -> logits of all new tokens, a tensor for each entry."""
        starts = [self.lengths[sequence] for sequence, _ in chunks]
        q_lens = [len(tokens) for _, tokens in chunks]
        for sequence, tokens in chunks:
            self.lengths[sequence] += len(tokens)
        metadata = build_attention_metadata(
            q_lens,
            [self.lengths[sequence] for sequence, _ in chunks],
            [self.tables[sequence] for sequence, _ in chunks],
            self.page_size,
        )
        ids = torch.tensor([token for _, tokens in chunks for token in tokens], dtype=torch.int32)
        positions = torch.tensor(
            [start + i for start, n in zip(starts, q_lens, strict=True) for i in range(n)], dtype=torch.int32
        )
        self.backend.plan(metadata)
        with forward_context(self.backend):
            logits = self.model.compute_logits(self.model(ids, positions))
        return list(logits.split(q_lens))


@pytest.fixture
def make_session() -> Callable[..., PagedSession]:
    return PagedSession


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """(model_type, seed, **config) -> a random HF model in fp32, and the directory it was saved to."""

    def write(model_type: str, *, seed: int = 0, **config: Any) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(seed)
        small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        hf_config = AutoConfig.for_model(model_type, **(small | heads | config))
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
        # Biases and norms begin at 0 and 1, where a mistake with them would not show.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
        directory = tmp_path / f"{model_type}-{seed}"
        model.save_pretrained(directory)
        return model, directory

    return write
