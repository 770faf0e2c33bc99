"""`AttentionMetadata`: the step contract, one member a field.

This class is the table. A member's type says what Python reads and its annotation the rest; `FIELDS` is read from it,
and the validator, static buffers, reference builder, documentation and the check of the C++ struct from `FIELDS`. To
add a field, add a member here and its property to the C++ struct; the tests and the handshake name what was forgotten.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import torch

from .vocabulary import Kind, Padding, When, alias, device, host, scalar

_LINEAR = "models with linear attention"
_LENGTHS = "backends that read lengths instead of offsets"
_DP = "models with data-parallel attention"


class AttentionMetadata(Protocol):
    """Metadata of one step, to be read only.

    T tokens, B sequences, P pages, R data-parallel ranks, W pages a row. The memory belongs to whoever built it and
    stays unmodified until the caller's stream has passed the step. A view that C++ handed over raises `RuntimeError`
    when it is read after its step.
    """

    slot_mapping: Annotated[
        torch.Tensor,
        device("T", "KV slot each token writes: page * page_size + offset; -1 writes nothing", Padding.MINUS_ONE),
    ]
    paged_kv_indptr: Annotated[
        torch.Tensor,
        device("B+1", "offsets of each sequence's pages in paged_kv_indices", Padding.REPEAT_LAST),
    ]
    paged_kv_indices: Annotated[
        torch.Tensor,
        device("P", "page indices of all sequences, one after the other", Padding.UNTOUCHED),
    ]
    paged_kv_last_page_len: Annotated[
        torch.Tensor,
        device("B", "tokens in each sequence's last page, 1..page_size; 0 for KV length 0", Padding.ZERO),
    ]
    kv_cu_seq_lens: Annotated[
        torch.Tensor,
        device("B+1", "cumulative KV lengths, this step's tokens included", Padding.REPEAT_LAST),
    ]
    qo_indptr: Annotated[
        torch.Tensor | None,
        device("B+1", "offsets of each sequence's query tokens", Padding.REPEAT_LAST, when=When.UNLESS_DECODE),
    ]
    q_cu_seq_lens: Annotated[torch.Tensor | None, alias("qo_indptr")]
    kv_seq_lens_host: Annotated[
        torch.Tensor,
        host("B+1", "host mirror of kv_cu_seq_lens (cumulative)", Padding.REPEAT_LAST),
    ]
    paged_kv_indptr_host: Annotated[torch.Tensor, host("B+1", "host mirror of paged_kv_indptr", Padding.REPEAT_LAST)]
    paged_kv_last_page_len_host: Annotated[
        torch.Tensor, host("B", "host mirror of paged_kv_last_page_len", Padding.ZERO)
    ]
    qo_indptr_host: Annotated[
        torch.Tensor | None,
        host("B+1", "host mirror of qo_indptr", Padding.REPEAT_LAST, when=When.UNLESS_DECODE),
    ]
    max_query_len: Annotated[int, scalar("longest query of the step; 0 when the step has no sequence")]
    max_seq_len: Annotated[int, scalar("longest KV length of the step; 0 when the step has no sequence")]
    is_prefill: Annotated[bool, scalar("whole prompts only, none with a prefix")]
    is_chunked_prefill: Annotated[
        bool, scalar("chunks, prefixes, prefill mixed with decode, or several tokens a sequence in decode")
    ]

    block_table: Annotated[
        torch.Tensor | None,
        device(
            "B,W",
            "page indices as a rectangle; entries beyond a sequence's pages are 0",
            Padding.ZERO,
            when=When.OPTIONAL,
            owner="backends that read rectangular page tables",
        ),
    ]
    kv_seq_lens: Annotated[
        torch.Tensor | None,
        device("B", "KV length of each sequence", Padding.ZERO, when=When.OPTIONAL, owner=_LENGTHS),
    ]
    q_seq_lens: Annotated[
        torch.Tensor | None,
        device("B", "query length of each sequence", Padding.ZERO, when=When.OPTIONAL, owner=_LENGTHS),
    ]
    linear_state_indices: Annotated[
        torch.Tensor | None,
        device("B", "state slot of each sequence; -1 has none", Padding.MINUS_ONE, when=When.OPTIONAL, owner=_LINEAR),
    ]
    has_initial_state: Annotated[
        torch.Tensor | None,
        device(
            "B",
            "whether the sequence's state slot holds an earlier chunk's state",
            Padding.ZERO,
            kind=Kind.TENSOR_BOOL,
            when=When.OPTIONAL,
            owner=_LINEAR,
        ),
    ]
    dp_token_counts: Annotated[
        torch.Tensor | None,
        host("R", "tokens of this step on each data-parallel rank", Padding.UNTOUCHED, when=When.OPTIONAL, owner=_DP),
    ]
    dp_is_decode: Annotated[
        torch.Tensor | None,
        host(
            "R",
            "whether each data-parallel rank decodes in this step",
            Padding.UNTOUCHED,
            kind=Kind.TENSOR_BOOL,
            when=When.OPTIONAL,
            owner=_DP,
        ),
    ]
