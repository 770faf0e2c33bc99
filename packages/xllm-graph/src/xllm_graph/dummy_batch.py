"""Builds batches without requests, for warm-up and capture. They write nothing to the KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from xllm_attention import AttentionBackend
from xllm_metadata import AttentionMetadata, build_attention_metadata


def empty_batch(backend: AttentionBackend) -> AttentionMetadata:
    """A batch without a token or a sequence. Padded to a bucket, it consists of padding alone."""
    return build_attention_metadata(
        [],
        [],
        [],
        backend.page_size,
        backend.limits.device,
        state_slots=_no_slots(backend, 0),
        group_page_tables=[[]] * backend.num_group_tables,
    )


def dummy_batch(backend: AttentionBackend, num_tokens: int, num_seqs: int, *, chunked: bool) -> AttentionMetadata:
    """A batch that attends to page 0, so that every kernel of its shape compiles and tunes itself. All slots are -1.

    The tokens are spread over at least `num_seqs` sequences, and over more where `max_model_len` requires it. As many
    tokens as sequences are a decode step. Otherwise `chunked` chooses between chunks and whole prompts.
    """
    page_size, max_model_len = backend.page_size, backend.limits.max_model_len
    num_seqs = max(num_seqs, -(-num_tokens // max_model_len))
    short, longer = divmod(num_tokens, num_seqs)
    q_lens = [short + (i < longer) for i in range(num_seqs)]
    if all(q_len == 1 for q_len in q_lens):
        chunked = False
    kv_lens = [min(q_len + chunked, max_model_len) for q_len in q_lens]
    tables = [[0] * -(-kv_len // page_size) for kv_len in kv_lens]
    step = build_attention_metadata(
        q_lens,
        kv_lens,
        tables,
        page_size,
        backend.limits.device,
        state_slots=_no_slots(backend, num_seqs),
        group_page_tables=[tables] * backend.num_group_tables,
    )
    slots, group_slots = step.slot_mapping, step.group_slot_mapping
    return replace(
        step,
        slot_mapping=torch.full_like(slots, -1),
        group_slot_mapping=None if group_slots is None else torch.full_like(group_slots, -1),
    )


def _no_slots(backend: AttentionBackend, num_seqs: int) -> list[int] | None:
    """The state slots of sequences that have none; None for a backend that reads no slots."""
    return [-1] * num_seqs if backend.runs_state_layers else None
