"""Renders the contract as text, from `FIELDS`. Owns the wording around the table, not the facts in it."""

from __future__ import annotations

import torch

from .builder import build_attention_metadata
from .fields import FIELDS
from .protocol import AttentionMetadata
from .schema import Field, Presence
from .version import CONTRACT_VERSION

_PAGE = """\
# The step contract, version {version}

What a C++ serving framework hands to Python model execution once per step, beside token ids and positions. This page
is generated: `python -m xllm_metadata --page` prints it, and it says everything that a C++ side needs.

Symbols: T tokens of the step, B sequences, P pages of all sequences together, W pages in the widest row, R
data-parallel ranks. A *page* is `page_size` consecutive KV slots; slot `s` is offset `s % page_size` of page
`s / page_size`.

## Fields

{table}

In C++ these are the properties of `xllm::AttentionMetadata` (`xllm/metadata/attention_metadata.h`), in this order. A
field that is not present is `std::nullopt` in C++ and `None` in Python. Tensors are contiguous. `*_host` tensors mirror
the device tensor of the same step, value by value, and are pinned where the device is CUDA: plans are made from them,
so that no step waits for the device.

Beside the metadata a step has `tokens` and `positions`, both int32 [T] on the device (0 in a padded row), and
`logits_indices`, int32 or int64 [n] on the device: the rows whose logits are wanted.

## Steps

| is_prefill | is_chunked_prefill | the step | query lengths |
| --- | --- | --- | --- |
| true | false | whole prompts, none with a prefix | equal to the KV lengths |
| false | true | chunks, prefixes, prefill mixed with decode, several tokens in decode | any, up to the KV length |
| false | false | decode | 1 each; T = B, qo_indptr and qo_indptr_host absent |
| true | true | illegal | |

KV lengths include this step's tokens. The tokens of a sequence are its last ones: query token `i` of `q_len` is at
position `kv_len - q_len + i`, and its slot is that position's place in the sequence's pages. A step without tokens, a
step without sequences and sequences of length 0 are legal. Sequences may share pages (a common prefix), but no two may
write one slot.

A live sequence's `paged_kv_last_page_len` is 1 to `page_size`. An empty row (KV length 0) has 0 there and no page; in
decode its slot is -1. It writes nothing, and its attention output is 0.

A *padded row* fills a step up to a graph's size; the table says what it holds. Padded rows come after the live ones,
look like empty rows, and need no page. Rows of T beyond the last sequence's tokens have slot -1.

Offsets into a cache are computed in 64 bits: a slot is an int32, slot * stride need not fit one.

## An example

`page_size` 4. Sequence 0 has 6 KV tokens in pages 4 and 2, of which 3 are new; sequence 1 decodes its 5th token, with
pages 9 and 3.

{example}

## Ownership, streams and lifetime

- The C++ side owns every tensor. Nothing is copied on the way to Python, and Python writes to none of them.
- Inputs are ready on the stream that is current on the calling thread; the step's work and its result are ordered on
  it.
- An executor's steps are handed over on one stream, or the host makes the stream of a step wait for the one of the step
  before: they share buffers, and the stream alone orders them. That holds for any threads that the calls come from.
- The C++ side keeps the tensors alive and unmodified until that stream has passed the step. Host tensors too: plans and
  copies may read them until then.
- The Python view of the metadata is valid inside the call. One that was kept raises `RuntimeError` when it is read
  later, instead of reading memory that may be gone; a tensor taken from it stays alive as any tensor does, but its
  content is the C++ side's to overwrite.
- The result is valid until the next `execute`: what is enqueued on the stream before that call sees it.
- So a step may be handed over while the device is at the one before (overlapped scheduling). Its tensors lie in other
  memory then, and its token ids may be what the sampler, on the same stream, has yet to write. Lengths and pages must
  be known.

## Fewer mirrors

A framework that has cumulative KV lengths on the host but not the other mirrors calls `complete_host_mirrors(metadata,
page_size)` (`xllm/metadata/host_mirrors.h`). It derives the absent ones without touching the device and reports what
cannot be derived.

## Versions

The bridge compares both sides when it starts and refuses a mismatch with a message that lists every difference.

- The *major* version changes when a field is removed, renamed, or changes kind, place, presence or meaning. Both sides
  must have the same.
- The *minor* version changes when optional fields are added, and for nothing else. A newer C++ side works with an older
  Python side, which does not see what it does not know. An older C++ side works with a newer Python side: the newer
  optional fields are absent.
- A field that one side lacks without such a reason is refused: one that is always present, one that is unknown to
  Python and not optional, or an optional one that the C++ side's version should have.

## Checking a host

`xllm_metadata.validate` checks a step, `positions` and `logits_indices` included, against the tables and the rules for
steps above, and names field, value and limit. It reads device tensors back, so it is off in production;
`XLLM_VALIDATE=1` in the environment, or `validate` in the executor's configuration, switches it on for every step.
Without it the executor refuses absent fields that it needs, and `tokens`, `positions` and `slot_mapping` of different
lengths.
"""


def fields_table() -> str:
    """The field table in Markdown."""
    rows = ["| field | shape, dtype | where | when | a padded graph row | meaning |", "| --- " * 6 + "|"]
    rows += [_row(field) for field in FIELDS]
    return "\n".join(rows)


def fields_page() -> str:
    """What `python -m xllm_metadata --fields` prints."""
    return f"Step contract {_version()}. T tokens, B sequences, P pages.\n\n{fields_table()}"


def contract_page() -> str:
    """What `python -m xllm_metadata --page` prints: the whole contract."""
    return _PAGE.format(version=_version(), table=fields_table(), example=_example())


def _version() -> str:
    return ".".join(map(str, CONTRACT_VERSION))


def _row(field: Field) -> str:
    name = field.name + (f" (alias {field.alias}, same tensor)" if field.alias else "")
    when = f"optional, for {field.used_by}" if field.presence is Presence.OPTIONAL else field.presence.value
    cells = (name, field.shape_text, field.memory.value, when, field.padding.value, field.doc)
    return "| " + " | ".join(cells) + " |"


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
