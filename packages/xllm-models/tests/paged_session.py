"""Runs a model over a paged KV cache: several sequences, any number of new tokens of any of them in one step.

Imported by path (conftest) and as a script's neighbour (tensor_parallel_rank), so it needs no test package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from xllm_attention import BackendLimits, create_backend, forward_context
from xllm_metadata import allocate_caches, build_attention_metadata
from xllm_models import CausalLM

TEXT_LENS = (19, 12, 23)

# One step a line: (sequence, number of its next tokens). Together they are the whole texts.
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 13), (1, 4)),  # whole prompts
    ((0, 1), (2, 7), (1, 3)),  # a decode, a new prompt and a chunk, in one batch
    ((2, 11), (0, 1)),  # a chunk after a prefix, before a decode
    *((((1, 1), (0, 1), (2, 1)),) * 4),  # decode
    ((2, 1),),
    ((1, 1),),
)


def texts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in TEXT_LENS]


class PagedSession:
    """Sequences on one model, each with its pages; unused slots hold NaN."""

    def __init__(self, model: CausalLM, *, num_sequences: int, max_len: int = 64, page_size: int = 4) -> None:
        self.model = model
        self.page_size = page_size
        self.lengths = [0] * num_sequences
        pages = -(-max_len // page_size)
        num_pages = num_sequences * pages
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [order[i * pages : (i + 1) * pages] for i in range(num_sequences)]
        self.backend = create_backend(
            "torch",
            model.layer_specs,
            BackendLimits(
                device=model.device,
                dtype=model.dtype,
                max_num_seqs=num_sequences,
                max_num_tokens=num_sequences * max_len,
                max_model_len=max_len,
            ),
        )
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_slots": num_sequences}
        self.has_states = self.backend.runs_state_layers
        self.backend.bind_kv_caches(allocate_caches(model.cache_specs, **sizes, device=model.device, fill=torch.nan))

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """(sequence, its new tokens) of one step -> logits [n, vocab] of the new tokens, a tensor for each entry."""
        ids: list[int] = []
        positions: list[int] = []
        for sequence, tokens in chunks:
            ids += tokens
            positions += range(self.lengths[sequence], self.lengths[sequence] + len(tokens))
            self.lengths[sequence] += len(tokens)
        q_lens = [len(tokens) for _, tokens in chunks]
        kv_lens = [self.lengths[sequence] for sequence, _ in chunks]
        tables = [self.tables[sequence] for sequence, _ in chunks]
        device = self.model.device
        slots = [sequence for sequence, _ in chunks] if self.has_states else None
        self.backend.plan(
            build_attention_metadata(q_lens, kv_lens, tables, self.page_size, device=device, state_slots=slots)
        )
        inputs = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ids, positions))
        with forward_context(self.backend):
            logits = self.model.compute_logits(self.model(*inputs))
        return list(torch.split(logits.cpu(), q_lens))


def run_steps(model: CausalLM) -> Iterator[tuple[int, int, torch.Tensor]]:
    """All of STEPS: (sequence, position of its first new token, logits of the new tokens)."""
    session = PagedSession(model, num_sequences=len(TEXT_LENS))
    rows = texts(model.config.vocab_size)
    for step in STEPS:
        starts = [session.lengths[sequence] for sequence, _ in step]
        chunks = [
            (sequence, rows[sequence][start : start + n]) for (sequence, n), start in zip(step, starts, strict=True)
        ]
        for (sequence, _), start, logits in zip(step, starts, session.step(chunks), strict=True):
            yield sequence, start, logits
    assert session.lengths == list(TEXT_LENS)
