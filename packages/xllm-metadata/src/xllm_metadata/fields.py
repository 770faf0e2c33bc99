"""The field table of the step contract: what crosses from C++ to Python once per step.

Owns the names, shapes, dtypes, places and padding of every field. The Protocol, the validator, the static buffers,
the documentation page and the check of the C++ struct all derive from `FIELDS`; nothing else lists fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """What a field holds."""

    TENSOR_INT32 = "int32 tensor"
    TENSOR_BOOL = "bool tensor"
    INT = "int"
    BOOL = "bool"

    @property
    def is_tensor(self) -> bool:
        """Whether the field is a tensor (the others are Python scalars)."""
        return self in (Kind.TENSOR_INT32, Kind.TENSOR_BOOL)


class Where(Enum):
    """Where a tensor's memory lies."""

    DEVICE = "device"
    HOST = "host"
    SCALAR = "-"


class When(Enum):
    """In which steps a field is present."""

    ALWAYS = "always"
    UNLESS_DECODE = "unless decode"
    OPTIONAL = "optional"


class Padding(Enum):
    """What a padded graph row (or token) holds."""

    REPEAT_LAST = "repeats the last value"
    ZERO = "0"
    MINUS_ONE = "-1"
    UNTOUCHED = "untouched beyond the live part"
    NONE = "-"

    @property
    def fill_value(self) -> int | None:
        """The constant that pads, or None where the padding is not a constant."""
        return {Padding.ZERO: 0, Padding.MINUS_ONE: -1}.get(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of the step contract.

    `shape` is symbolic: T tokens, B sequences, P pages, R data-parallel ranks, W the widest page table of the step.
    `since` is the contract version, (major, minor), that brought the field.
    """

    name: str
    kind: Kind
    shape: tuple[str, ...] = ()
    where: Where = Where.SCALAR
    when: When = When.ALWAYS
    padding: Padding = Padding.NONE
    doc: str = ""
    alias: str | None = None
    since: tuple[int, int] = (1, 0)
    owner: str = "every model"

    @property
    def shape_text(self) -> str:
        """The shape and dtype as documentation shows them."""
        if not self.kind.is_tensor:
            return self.kind.value
        return f"[{', '.join(self.shape)}] {self.kind.value.removesuffix(' tensor')}"


def _device(name: str, shape: str, padding: Padding, doc: str, **extra: object) -> Field:
    return Field(
        name=name,
        kind=Kind.TENSOR_INT32,
        shape=(shape,),
        where=Where.DEVICE,
        padding=padding,
        doc=doc,
        **extra,  # type: ignore[arg-type]
    )


def _host(name: str, shape: str, padding: Padding, doc: str, **extra: object) -> Field:
    return Field(
        name=name,
        kind=Kind.TENSOR_INT32,
        shape=(shape,),
        where=Where.HOST,
        padding=padding,
        doc=doc,
        **extra,  # type: ignore[arg-type]
    )


_STEP_FIELDS: Final = (
    _device(
        "slot_mapping",
        "T",
        Padding.MINUS_ONE,
        "KV slot each token writes: page * page_size + offset; -1 writes nothing",
    ),
    _device("paged_kv_indptr", "B+1", Padding.REPEAT_LAST, "offsets of each sequence's pages in paged_kv_indices"),
    _device("paged_kv_indices", "P", Padding.UNTOUCHED, "page indices of all sequences, one after the other"),
    _device(
        "paged_kv_last_page_len",
        "B",
        Padding.ZERO,
        "tokens in each sequence's last page, 1..page_size; 0 for a sequence of KV length 0",
    ),
    _device("kv_cu_seq_lens", "B+1", Padding.REPEAT_LAST, "cumulative KV lengths, this step's tokens included"),
    _device(
        "qo_indptr",
        "B+1",
        Padding.REPEAT_LAST,
        "offsets of each sequence's query tokens",
        when=When.UNLESS_DECODE,
        alias="q_cu_seq_lens",
    ),
    _host("kv_seq_lens_host", "B+1", Padding.REPEAT_LAST, "host mirror of kv_cu_seq_lens (cumulative)"),
    _host("paged_kv_indptr_host", "B+1", Padding.REPEAT_LAST, "host mirror of paged_kv_indptr"),
    _host("paged_kv_last_page_len_host", "B", Padding.ZERO, "host mirror of paged_kv_last_page_len"),
    _host("qo_indptr_host", "B+1", Padding.REPEAT_LAST, "host mirror of qo_indptr", when=When.UNLESS_DECODE),
    Field(name="max_query_len", kind=Kind.INT, doc="longest query of the step; 0 when the step has no sequence"),
    Field(
        name="max_seq_len",
        kind=Kind.INT,
        doc="longest KV length of the step; 0 when the step has no sequence",
    ),
    Field(name="is_prefill", kind=Kind.BOOL, doc="whole prompts only, none with a prefix"),
    Field(
        name="is_chunked_prefill",
        kind=Kind.BOOL,
        doc="chunks, prefixes, prefill mixed with decode, or several tokens a sequence in decode",
    ),
)

_OPTIONAL_FIELDS: Final = (
    Field(
        name="block_table",
        kind=Kind.TENSOR_INT32,
        shape=("B", "W"),
        where=Where.DEVICE,
        when=When.OPTIONAL,
        padding=Padding.ZERO,
        doc="page indices as a rectangle; entries beyond a sequence's pages are 0",
        owner="backends that read rectangular page tables",
    ),
    _device(
        "kv_seq_lens", "B", Padding.ZERO, "KV length of each sequence", when=When.OPTIONAL,
        owner="backends that read lengths instead of offsets",
    ),
    _device(
        "q_seq_lens", "B", Padding.ZERO, "query length of each sequence", when=When.OPTIONAL,
        owner="backends that read lengths instead of offsets",
    ),
    _device(
        "linear_state_indices", "B", Padding.MINUS_ONE, "state slot of each sequence; -1 has none",
        when=When.OPTIONAL, owner="models with linear attention",
    ),
    Field(
        name="has_initial_state",
        kind=Kind.TENSOR_BOOL,
        shape=("B",),
        where=Where.DEVICE,
        when=When.OPTIONAL,
        padding=Padding.ZERO,
        doc="whether the sequence's state slot holds an earlier chunk's state",
        owner="models with linear attention",
    ),
    _host(
        "dp_token_counts", "R", Padding.UNTOUCHED, "tokens of this step on each data-parallel rank",
        when=When.OPTIONAL, owner="models with data-parallel attention",
    ),
    Field(
        name="dp_is_decode",
        kind=Kind.TENSOR_BOOL,
        shape=("R",),
        where=Where.HOST,
        when=When.OPTIONAL,
        padding=Padding.UNTOUCHED,
        doc="whether each data-parallel rank decodes in this step",
        owner="models with data-parallel attention",
    ),
)  # fmt: skip

FIELDS: Final[tuple[Field, ...]] = _STEP_FIELDS + _OPTIONAL_FIELDS
"""Every field of the contract, in the order in which the C++ struct declares them."""

FIELDS_BY_NAME: Final[dict[str, Field]] = {field.name: field for field in FIELDS}
