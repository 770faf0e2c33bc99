"""Renders the step contract as Markdown: the text of docs/contract.md, with the table and the example generated."""

from __future__ import annotations

import torch

from .builder import build_attention_metadata
from .fields import FIELDS
from .protocol import AttentionMetadata
from .schema import Field, Presence
from .version import CONTRACT_VERSION

_PAGE = """\
# The step contract, version {version}

A C++ serving framework passes one `AttentionMetadata` per step to Python model execution, next to token ids and
positions. This page specifies it completely. The page is generated: `python -m xllm_metadata --page` prints it.

Symbols: T tokens of the step, B sequences, P pages of all sequences together, W pages of the longest sequence, R
data-parallel ranks, G KV cache groups with page tables of their own. A *page* is `page_size` consecutive KV slots; slot
`s` is offset `s % page_size` of page `s / page_size`.

## Fields

{table}

In C++ these are the properties of `xllm_metadata::AttentionMetadata` (`xllm_metadata/attention_metadata.h`), in this
order. An absent field is `std::nullopt` in C++ and `None` in Python. Tensors are contiguous. A `*_host` tensor is the
host mirror of a device tensor: it has the same values, and it is pinned when the device is CUDA. Attention backends
plan from the mirrors, so that no step waits for the device.

A step also has `tokens` and `positions`, both int32 [T] on the device (0 in a padded row), and `logits_indices`, int32
or int64 [n] on the device: the rows whose logits the host wants.

Models with linear attention need the fields of state slots, and the KV cache groups of a host need their page tables.
No model or backend of this repository reads the other optional fields yet. They are reserved, so that the C++ side can
be built with them now:

{optional}

## Steps

| is_prefill | is_chunked_prefill | the step | query lengths |
| --- | --- | --- | --- |
| true | false | whole prompts, none with a prefix | equal to the KV lengths |
| false | true | chunks, prefixes, prefill mixed with decode, multi-token decode | any, up to the KV length |
| false | false | decode | 1 each; T = B, qo_indptr and qo_indptr_host absent |
| true | true | illegal | |

A KV length includes this step's tokens, which are the last ones of their sequence. Query token `i` of `q_len` is at
position `kv_len - q_len + i`, and `slot_mapping` has the slot of that position in the sequence's pages. A step without
tokens, a step without sequences and a sequence of length 0 are legal. Sequences may share pages (a common prefix), but
no two may write the same slot.

The `paged_kv_last_page_len` of a live sequence is 1 to `page_size`. An *empty row* is a sequence of KV length 0: its
`paged_kv_last_page_len` is 0 and it has no page. In decode an empty row still has one token, with slot -1. It writes
nothing, and its attention output is 0.

A *padded row* fills a step up to a graph's size; the table gives its content. Padded rows come after the live ones.
They are empty rows, so they need no page. Tokens after the last sequence's have slot -1.

## KV cache groups

A model may have layers with a sliding window. A query of such a layer sees only the last keys, so the host can free the
pages that have left the window. Then these layers need page tables of their own:

- `CausalLM.cache_specs` gives each layer a `group` and a `window`. Group 0 has the layers without a window, or none.
  Each window size has a group from 1 on. All caches of a group have the same number of pages.
- A host with one page table for all layers ignores both. This is the default, and costs nothing.
- Other hosts set `kv_groups` in the executor's configuration, and pass `group_slot_mapping` and
  `group_paged_kv_indices` in every step. Row `g - 1` belongs to group `g`. The tables of all groups have the same
  offsets, lengths and numbers of entries: those of `paged_kv_indptr`. G counts the groups from 1 on.
- `paged_kv_indices` is the table of group 0, also if no layer reads it.
- A query at position `p` of a group with window `w` sees the keys from `p - w + 1` on. Before a step that computes the
  positions from `p` on, the host may free every page that has only tokens before `p - w + 1`. The entry of a freed page
  stays in the table, with any index of the group. The page's content does not matter: another sequence may write it.

Compute offsets into a cache in 64 bits. A slot fits an int32; slot * stride may not.

## An example

`page_size` is 4. Sequence 0 has 6 KV tokens in pages 4 and 2, of which 3 are new. Sequence 1 decodes its 5th token, in
pages 9 and 3.

{example}

## Ownership, streams and lifetime

- The C++ side owns every tensor. The bridge copies none of them, and Python writes to none of them.
- Inputs must be ready on the calling thread's current stream. The step's work and its result are ordered on that
  stream.
- All steps of an executor share its buffers, and only the stream orders them. So pass them on one stream, from any
  thread. If a step uses another stream, make that stream wait for the previous step's.
- The C++ side keeps the tensors alive and unmodified until the stream has passed the step. This includes host tensors:
  plans and copies may read them until then.
- The Python view of the metadata is valid during the call. A view that is kept raises `RuntimeError` when it is read
  later, because its memory may be freed. A tensor taken from it stays alive, but the C++ side may overwrite its
  content.
- The result is valid until the next `execute`: work that is enqueued on the stream before that call sees it.
- A step may be passed while the device still runs the previous one (overlapped scheduling). Then it needs tensors of
  its own. Its token ids may still be unwritten, if the sampler writes them on the same stream. Its lengths and pages
  must be known.

## Deriving host mirrors

A framework that has only the cumulative KV lengths on the host calls `complete_host_mirrors(metadata, page_size)`
(`xllm_metadata/host_mirrors.h`). It computes the absent mirrors without touching the device, and throws when one
cannot be derived.

## Versions

The bridge compares both sides when it starts. It refuses a mismatch with a message that lists every difference.

- The *major* version changes when a field is removed or renamed, or its type, memory, presence or meaning changes.
  Both sides must have the same major version.
- The *minor* version changes when optional fields are added, and for nothing else. A C++ side with a newer minor
  version works: Python ignores the fields that it does not know. A C++ side with an older minor version works too: the
  newer optional fields are absent.
- All other differences are refused: a field missing in C++ that is always present or that the C++ side's version has,
  and a field unknown to Python that is not optional or not of a newer version.
- A field's version (`since`), the contract's version and `version.h` are checked against each other: no field is newer
  than the contract, and a minor version above 0 has a field of exactly that version.

## Checking a host

`xllm_metadata.validate` checks a step, including `positions` and `logits_indices`, against the table and the rules
above. Its errors name the field, its value and the limit. It reads device tensors back to the host, so it is off in
production. `XLLM_VALIDATE=1` in the environment, or `validate` in the executor's configuration, switches it on for
every step.

Without it, the executor checks shapes, devices and host mirrors of every step, and reads no device value
(`xllm_metadata.check_step`). It refuses:

- absent fields that it needs, and `tokens`, `positions` and `slot_mapping` of different lengths;
- a tensor on another device than the caches, and a host mirror that is not on the CPU;
- page tables that do not fit: `paged_kv_indptr_host` and `paged_kv_last_page_len_host` must give each sequence the
  pages of the caches' `page_size` that its KV length needs, and `paged_kv_indices` must have an entry for each page;
- a KV length above `max_seq_len`, and a `*_indptr_host` or `kv_seq_lens_host` that does not start at 0.

Only `validate` finds wrong values in device tensors: page indices and slots outside of the cache, slots of other pages,
two writes to one slot, positions, `logits_indices` out of range, and a host mirror that differs from its device tensor.
It also finds wrong dtypes and sizes of the fields that are not named above.
"""


def fields_table() -> str:
    """The field table in Markdown."""
    rows = ["| field | shape, dtype | memory | present | content of a padded row | meaning |", "| --- " * 6 + "|"]
    rows += [_row(field) for field in FIELDS]
    return "\n".join(rows)


def fields_page() -> str:
    """The field table with its legend, as `python -m xllm_metadata --fields` prints it."""
    return f"Step contract {_version()}. T tokens, B sequences, P pages.\n\n{fields_table()}"


def contract_page() -> str:
    """The whole contract, as `python -m xllm_metadata --page` prints it."""
    return _PAGE.format(version=_version(), table=fields_table(), optional=_optional_fields(), example=_example())


def _version() -> str:
    return ".".join(map(str, CONTRACT_VERSION))


def _row(field: Field) -> str:
    name = field.name + (f" (alias {field.alias}, same tensor)" if field.alias else "")
    cells = (name, field.shape_text, field.memory.value, field.presence.value, field.padding.value, field.doc)
    return "| " + " | ".join(cells) + " |"


def _optional_fields() -> str:
    by_user: dict[str, list[str]] = {}
    for field in FIELDS:
        if field.presence is Presence.OPTIONAL:
            by_user.setdefault(field.used_by, []).append(f"`{field.name}`")
    return "\n".join(f"- {', '.join(names)}: for {user}" for user, names in by_user.items())


def _example() -> str:
    step = build_attention_metadata(q_lens=[3, 1], kv_lens=[6, 5], page_tables=[[4, 2], [9, 3]], page_size=4)
    rows = ["| field | value |", "| --- | --- |"]
    rows += [f"| {field.name} | {_value(step, field)} |" for field in FIELDS if field.presence is not Presence.OPTIONAL]
    return "\n".join(rows)


def _value(step: AttentionMetadata, field: Field) -> str:
    value = getattr(step, field.name)
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return str(value).lower()
