"""The conformance suite finds faults: a plain backend passes it, and fails with any one fault planted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from xllm_attention import AttentionBackend, BackendCapabilities, Phase, Step
from xllm_attention.conformance import CASES, Case, ConformanceError, check_large_cache, run_case


class PlainBackend(AttentionBackend):
    """Row by row, over whole gathered pages. `fault` names what it does wrong."""

    name = "plain"
    capabilities = BackendCapabilities(full_graph_phases=frozenset({Phase.DECODE}))

    def __init__(self, *args: Any, fault: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault = fault
        self.planned = False

    def _bind(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int) -> None:
        self.caches = caches

    def _plan_step(self, step: Step) -> None:
        if self.fault == "plans only once" and self.planned:
            return
        self.planned = True
        m = step.metadata
        self.slots = m.slot_mapping.tolist()
        self.kv_lens = [b - a for a, b in pairwise(m.kv_seq_lens_host.tolist())]
        indptr, pages = m.paged_kv_indptr_host.tolist(), m.paged_kv_indices.tolist()
        self.pages = [pages[a:b] for a, b in pairwise(indptr)]
        self.rows = list(range(step.num_seqs + 1)) if m.qo_indptr_host is None else m.qo_indptr_host.tolist()

    def _plan_group(self, step: Step, group: int) -> None:
        pass

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
        if self.fault == "writes nothing":
            self.attend(q, out, layer_id)
        elif self.fault == "attends before it writes":
            self.attend(q, out, layer_id)
            self.append(k, v, layer_id)
        else:
            self.append(k, v, layer_id)
            self.attend(q, out, layer_id)

    def append(self, k: torch.Tensor, v: torch.Tensor, layer_id: int) -> None:
        for row, slot in enumerate(self.slots):
            for cache, values in zip(self.caches[layer_id], (k, v), strict=True):
                target = slot
                if slot < 0 and self.fault == "slot -1 writes the last slot":
                    target = cache.shape[0] * self.page_size - 1
                elif slot < 0 and self.fault == "slot -1 writes slot 0":
                    target = 0
                elif slot < 0:
                    continue
                if self.fault == "int32 offsets":
                    size = cache[0, 0].numel()
                    target = ((target * size + 2**31) % 2**32 - 2**31) // size
                cache[target // self.page_size, target % self.page_size] = values[row]

    def attend(self, q: torch.Tensor, out: torch.Tensor, layer_id: int) -> None:
        if self.fault != "tail left as it was":
            out[self.rows[-1] :] = 0
        if self.fault == "modifies q":
            q *= 1.0
            q[: self.rows[-1]] *= 2.0
        for (first, end), kv_len, pages in zip(pairwise(self.rows), self.kv_lens, self.pages, strict=True):
            k, v = (cache[pages].flatten(0, 1).float() for cache in self.caches[layer_id])
            for row in range(first, end):
                if kv_len == 0 and self.fault != "empty rows left as they were":
                    out[row] = 0
                elif kv_len:
                    out[row] = self.attend_row(q[row].float(), k, v, kv_len - end + row, kv_len, layer_id)

    def attend_row(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, kv_len: int, layer_id: int
    ) -> torch.Tensor:
        spec = self.specs[0 if self.fault == "one spec for all layers" else layer_id]
        window = spec.sliding_window + {"window one too long": 1, "window one too short": -1}.get(self.fault, 0)
        window = window if spec.sliding_window else 0
        end = {"sees later tokens": kv_len, "sees the previous token's keys": max(1, position)}.get(
            self.fault, position + 1
        )
        visible = torch.zeros(k.shape[0], dtype=torch.bool)
        visible[max(0, position + 1 - window) if window else 0 : end] = True
        if self.fault == "reads after the end":
            visible[position + 1 :] = True
        heads = torch.arange(spec.num_heads)
        heads = heads % spec.num_kv_heads if self.fault == "wrong head" else heads // spec.group_size
        scores = torch.einsum("hd,lhd->hl", q, k[:, heads]) * spec.scale
        if spec.logits_soft_cap and self.fault != "no soft cap":
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        if self.fault == "adds the mask":
            weights = (scores + torch.where(visible, 0.0, -torch.inf)).softmax(dim=-1)
        else:
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        if self.fault != "0 * NaN of masked values":
            v = v.masked_fill(~visible[:, None, None], 0)
        if self.fault == "hides what is not finite":
            weights, v = weights.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
        return torch.einsum("hl,lhd->hd", weights, v[:, heads])


SHORT_CASES = tuple(case for case in CASES if sum(case.final_lens) < 500)  # row by row is slow

ERROR = r"sequence \d+, token \d+ of \d+, head \d+: relative error \S+ exceeds"
PADDING = r"output row \d+ belongs to no live token and is not 0"
OVERWRITTEN = "cache is not this step's, yet overwritten"
# Fault -> the message of the check that is meant to find it.
FAULTS = {
    "window one too long": ERROR,
    "window one too short": ERROR,
    "slot -1 writes the last slot": OVERWRITTEN,
    "slot -1 writes slot 0": r"slot 0 of the k cache is",
    "0 * NaN of masked values": ERROR,
    "reads after the end": ERROR,
    "sees later tokens": ERROR,
    "sees the previous token's keys": ERROR,
    "one spec for all layers": ERROR,
    "tail left as it was": PADDING,
    "empty rows left as they were": PADDING,
    "plans only once": OVERWRITTEN,
    "writes nothing": "cache is written wrongly",
    "attends before it writes": ERROR,
    "wrong head": ERROR,
    "no soft cap": ERROR,
    "adds the mask": ERROR,
    "hides what is not finite": r"sequence \d+, token \d+ of \d+ is finite, but sees a key or value that is not",
    "modifies q": "the inputs were modified",
}


def _error(fault: str, case: Case) -> str | None:
    """What the suite says of a case; None when it passes. An exception of the backend's own code is no answer."""
    try:
        result = run_case(partial(PlainBackend, fault=fault), case)
    except ConformanceError as error:
        return str(error)
    assert result.refused is None
    return None


@pytest.mark.parametrize("case", SHORT_CASES, ids=lambda case: case.name)
def test_plain_backend_passes(case: Case) -> None:
    assert _error("", case) is None


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_fault_is_found_by_the_check_that_is_meant_to(fault: str, message: str) -> None:
    found = next(error for case in reversed(SHORT_CASES) if (error := _error(fault, case)) is not None)
    assert re.search(message, found)


@pytest.mark.parametrize(
    ("fault", "window"),
    # One less than 1 would be no window at all.
    [("window one too long", w) for w in (1, 2, 15, 16, 17)] + [("window one too short", w) for w in (2, 15, 16, 17)],
)
@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
def test_window_fault_is_found_at_every_width(fault: str, phase: str, window: int) -> None:
    case = next(case for case in CASES if case.name == f"{phase}-window{window}")
    found = _error(fault, case)
    assert found is not None
    assert re.search(ERROR, found)


def test_nan_leak_is_found_in_every_phase() -> None:
    for phase in ("decode", "prefill", "mixed", "graph-decode"):
        case = next(case for case in CASES if case.name == phase)
        found = _error("0 * NaN of masked values", case)
        assert found is not None
        assert re.search(ERROR, found)


def test_int32_offsets_are_found() -> None:
    check_large_cache(PlainBackend)
    with pytest.raises(ConformanceError, match="large cache"):
        check_large_cache(partial(PlainBackend, fault="int32 offsets"))


def test_refusal_is_reported_not_passed() -> None:
    class Narrow(PlainBackend):
        capabilities = BackendCapabilities(head_dims=frozenset({64, 128}))

    by_name = {case.name: case for case in CASES}
    refused = run_case(Narrow, by_name["decode-dim80"]).refused
    assert refused == "attention backend 'plain' cannot serve layer 0: head_dim 80; served are [64, 128]"
    assert run_case(Narrow, by_name["graph-decode"]).refused == "plain has no decode in a full graph"
    assert run_case(Narrow, by_name["decode"]).refused is None
