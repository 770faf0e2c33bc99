"""Steps without requests, for warm-up and capture: they write nothing to the KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from xllm_metadata import AttentionMetadata, build_attention_metadata


def empty_batch(page_size: int, device: torch.device) -> AttentionMetadata:
    """No token, no sequence: what is left of a padded step when only the padding is looked at."""
    return build_attention_metadata([], [], [], page_size, device)


def dummy_batch(
    num_tokens: int, num_seqs: int, *, max_model_len: int, page_size: int, chunked: bool, device: torch.device
) -> AttentionMetadata:
    """A step that attends like a real one, over whatever page 0 holds, so that every kernel of its shape gets ready.

    The tokens are spread over as many sequences as `max_model_len` asks for, at least `num_seqs`. With as many tokens
    as sequences it is a decode step; else `chunked` decides between chunks and whole prompts.
    """
    num_seqs = max(num_seqs, -(-num_tokens // max_model_len))
    short, longer = divmod(num_tokens, num_seqs)
    q_lens = [short + (i < longer) for i in range(num_seqs)]
    if all(q_len == 1 for q_len in q_lens):
        chunked = False
    kv_lens = [min(q_len + chunked, max_model_len) for q_len in q_lens]
    tables = [[0] * -(-kv_len // page_size) for kv_len in kv_lens]
    step = build_attention_metadata(q_lens, kv_lens, tables, page_size, device)
    return replace(step, slot_mapping=torch.full_like(step.slot_mapping, -1))
