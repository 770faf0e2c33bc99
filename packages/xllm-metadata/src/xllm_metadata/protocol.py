"""`AttentionMetadata`: the step contract, one member per field.

This class is the field table. A member's type is what Python reads; its annotation says the rest. `FIELDS` is read from
it. The validator, the static buffers, the documentation and the check of the C++ struct use `FIELDS`.

To add a field: add a member here with the new `since`; add the field to `BuiltAttentionMetadata`,
`StaticAttentionMetadata` and the C++ struct; raise the version in version.py and version.h. A check names each of these
steps that is missing.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import torch

from .schema import FieldType, Padding, Presence, device_tensor, host_tensor, scalar

_LINEAR = "models with linear attention"
_LENGTHS = "backends that read lengths instead of offsets"
_GROUPS = "sliding-window layers whose pages the host frees"
_DP = "models with data-parallel attention"


class AttentionMetadata(Protocol):
    """Metadata of one step, to be read only.

    T tokens, B sequences, P pages, R data-parallel ranks, W pages of the longest sequence, G KV cache groups with page
    tables of their own. The builder owns the memory and leaves it unmodified until the caller's stream has passed the
    step. A view from C++ raises `RuntimeError` when it is read after its step.
    """

    slot_mapping: Annotated[
        torch.Tensor,
        device_tensor("T", "KV slot that each token writes: page * page_size + offset; -1: none", Padding.MINUS_ONE),
    ]
    paged_kv_indptr: Annotated[
        torch.Tensor,
        device_tensor("B+1", "offsets of each sequence's pages in paged_kv_indices", Padding.REPEAT_LAST),
    ]
    paged_kv_indices: Annotated[
        torch.Tensor,
        device_tensor("P", "page indices of all sequences, concatenated", Padding.UNTOUCHED),
    ]
    paged_kv_last_page_len: Annotated[
        torch.Tensor,
        device_tensor("B", "tokens in each sequence's last page, 1..page_size; 0 for KV length 0", Padding.ZERO),
    ]
    kv_cu_seq_lens: Annotated[
        torch.Tensor,
        device_tensor("B+1", "cumulative KV lengths, including this step's tokens", Padding.REPEAT_LAST),
    ]
    qo_indptr: Annotated[
        torch.Tensor | None,
        device_tensor(
            "B+1",
            "offsets of each sequence's query tokens",
            Padding.REPEAT_LAST,
            presence=Presence.UNLESS_DECODE,
            alias="q_cu_seq_lens",
        ),
    ]
    kv_seq_lens_host: Annotated[
        torch.Tensor,
        host_tensor("B+1", "host mirror of kv_cu_seq_lens (cumulative)", Padding.REPEAT_LAST),
    ]
    paged_kv_indptr_host: Annotated[
        torch.Tensor, host_tensor("B+1", "host mirror of paged_kv_indptr", Padding.REPEAT_LAST)
    ]
    paged_kv_last_page_len_host: Annotated[
        torch.Tensor, host_tensor("B", "host mirror of paged_kv_last_page_len", Padding.ZERO)
    ]
    qo_indptr_host: Annotated[
        torch.Tensor | None,
        host_tensor("B+1", "host mirror of qo_indptr", Padding.REPEAT_LAST, presence=Presence.UNLESS_DECODE),
    ]
    max_query_len: Annotated[int, scalar("longest query length; 0 if the step has no sequence")]
    max_seq_len: Annotated[int, scalar("longest KV length; 0 if the step has no sequence")]
    is_prefill: Annotated[bool, scalar("whole prompts only, none with a prefix")]
    is_chunked_prefill: Annotated[
        bool, scalar("chunks, prefixes, prefill mixed with decode, or several tokens per sequence in decode")
    ]

    block_table: Annotated[
        torch.Tensor | None,
        device_tensor(
            "B,W",
            "page table: page indices by sequence; 0 after a sequence's last page",
            Padding.ZERO,
            presence=Presence.OPTIONAL,
            used_by="backends that read a rectangular page table",
        ),
    ]
    kv_seq_lens: Annotated[
        torch.Tensor | None,
        device_tensor("B", "KV length of each sequence", Padding.ZERO, presence=Presence.OPTIONAL, used_by=_LENGTHS),
    ]
    q_seq_lens: Annotated[
        torch.Tensor | None,
        device_tensor("B", "query length of each sequence", Padding.ZERO, presence=Presence.OPTIONAL, used_by=_LENGTHS),
    ]
    linear_state_indices: Annotated[
        torch.Tensor | None,
        device_tensor(
            "B",
            "state slot of each sequence; -1: none",
            Padding.MINUS_ONE,
            presence=Presence.OPTIONAL,
            used_by=_LINEAR,
        ),
    ]
    linear_state_write_indices: Annotated[
        torch.Tensor | None,
        device_tensor(
            "B",
            "state slot that each sequence's new state is written to, and that no other sequence of the step reads or "
            "writes; -1: none. Absent: linear_state_indices",
            Padding.MINUS_ONE,
            presence=Presence.OPTIONAL,
            since=(1, 1),
            used_by=_LINEAR,
        ),
    ]
    has_initial_state: Annotated[
        torch.Tensor | None,
        device_tensor(
            "B",
            "whether the state slot holds the state of an earlier chunk",
            Padding.ZERO,
            type=FieldType.BOOL_TENSOR,
            presence=Presence.OPTIONAL,
            used_by=_LINEAR,
        ),
    ]
    dp_token_counts: Annotated[
        torch.Tensor | None,
        host_tensor(
            "R",
            "tokens of this step on each data-parallel rank",
            Padding.UNTOUCHED,
            presence=Presence.OPTIONAL,
            used_by=_DP,
        ),
    ]
    dp_is_decode: Annotated[
        torch.Tensor | None,
        host_tensor(
            "R",
            "whether each data-parallel rank runs decode in this step",
            Padding.UNTOUCHED,
            type=FieldType.BOOL_TENSOR,
            presence=Presence.OPTIONAL,
            used_by=_DP,
        ),
    ]
    group_slot_mapping: Annotated[
        torch.Tensor | None,
        device_tensor(
            "G,T",
            "KV slot that each token writes in KV cache groups 1 to G; -1: none",
            Padding.MINUS_ONE,
            presence=Presence.OPTIONAL,
            since=(1, 2),
            used_by=_GROUPS,
        ),
    ]
    group_paged_kv_indices: Annotated[
        torch.Tensor | None,
        device_tensor(
            "G,P",
            "page indices of KV cache groups 1 to G, at the offsets of paged_kv_indptr. A page whose tokens have all "
            "left the sliding window has any index of the group",
            Padding.UNTOUCHED,
            presence=Presence.OPTIONAL,
            since=(1, 2),
            used_by=_GROUPS,
        ),
    ]

    @property
    def q_cu_seq_lens(self) -> torch.Tensor | None:
        """Alias of `qo_indptr`: the same tensor."""
        ...
