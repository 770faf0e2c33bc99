"""Compares a model, module by module, with HF transformers or with a dumped trace.

Owns the traces, the matching of their entries, and the report. The command line is `python -m xllm_models compare`.
"""

from __future__ import annotations

from .dump import read_dump, write_dump
from .hf import trace_hf
from .ours import trace_ours
from .ranks import RankDifference, first_difference, trace_rank
from .report import TOLERANCES, EntryError, Position, Report, compare_traces
from .trace import LOGITS, Trace

__all__ = [
    "LOGITS",
    "TOLERANCES",
    "EntryError",
    "Position",
    "RankDifference",
    "Report",
    "Trace",
    "compare_traces",
    "first_difference",
    "read_dump",
    "trace_hf",
    "trace_ours",
    "trace_rank",
    "write_dump",
]
