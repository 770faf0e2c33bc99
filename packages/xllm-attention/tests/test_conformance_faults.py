"""The conformance suite finds faults: a plain backend passes it, and fails with any one fault planted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from xllm_attention import AttentionBackend, AttentionSpec, BackendCapabilities, Phase, Step
from xllm_attention.conformance import CASES, Case, ConformanceError, check_large_cache, run_case
from xllm_attention.fp8_cache import FP8, quantize
from xllm_attention.kv_groups import pages_of, slots_of


class PlainBackend(AttentionBackend):
    """Row by row, over whole gathered pages. `fault` names what it does wrong."""

    name = "plain"
    capabilities = BackendCapabilities(
        full_graph_phases=frozenset({Phase.DECODE}),
        sinks=True,
        v_head_dims=True,
        latent=True,
        kv_groups=True,
        cache_dtypes=frozenset({FP8}),
    )

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
        kv_groups = range(self.num_group_tables + 1)
        slot_groups = [0] * len(kv_groups) if self.fault == "slots of group 0 in all groups" else kv_groups
        page_groups = [0] * len(kv_groups) if self.fault == "pages of group 0 in all groups" else kv_groups
        self.slots = [slots_of(m, group).tolist() for group in slot_groups]
        self.kv_lens = [b - a for a, b in pairwise(m.kv_seq_lens_host.tolist())]
        indptr = m.paged_kv_indptr_host.tolist()
        self.pages = [[pages_of(m, group).tolist()[a:b] for a, b in pairwise(indptr)] for group in page_groups]
        self.rows = list(range(step.num_seqs + 1)) if m.qo_indptr_host is None else m.qo_indptr_host.tolist()

    def _plan_group(self, step: Step, group: int) -> None:
        pass

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> None:
        if self.fault == "writes nothing":
            self.attend(q, out, layer_id, sinks)
        elif self.fault == "attends before it writes":
            self.attend(q, out, layer_id, sinks)
            self.append(k, v, layer_id)
        else:
            self.append(k, v, layer_id)
            self.attend(q, out, layer_id, sinks)

    def append(self, k: torch.Tensor, v: torch.Tensor, layer_id: int) -> None:
        for row, slot in enumerate(self.slots[self.kv_group_of_layer[layer_id]]):
            latent = self.specs[layer_id].latent and self.fault != "appends values over keys"
            scales = self.scales_of(layer_id)
            for cache, values, scale in zip(self.caches[layer_id], (k,) if latent else (k, v), scales, strict=False):
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
                cache[target // self.page_size, target % self.page_size] = self.entry(values[row], scale)

    def scales_of(self, layer_id: int) -> tuple[float | None, float | None]:
        """(k_scale, v_scale) of a layer; None without an fp8 cache."""
        scales = self.cache_scales[0 if self.fault == "scales of layer 0 in all layers" else layer_id]
        if scales is None:
            return None, None
        return (scales.v, scales.k) if self.fault == "scales of keys and values swapped" else (scales.k, scales.v)

    def entry(self, values: torch.Tensor, scale: float | None) -> torch.Tensor:
        """What the cache holds of a token."""
        if scale is None:
            return values
        if self.fault == "infinity becomes 448":
            return (values.float() / scale).clamp(-448, 448).to(FP8)
        return quantize(values, scale)

    def attend(self, q: torch.Tensor, out: torch.Tensor, layer_id: int, sinks: torch.Tensor | None) -> None:
        if self.fault != "tail left as it was":
            out[self.rows[-1] :] = 0
        if self.fault == "modifies q":
            q *= 1.0
            q[: self.rows[-1]] *= 2.0
        page_tables = self.pages[self.kv_group_of_layer[layer_id]]
        for (first, end), kv_len, pages in zip(pairwise(self.rows), self.kv_lens, page_tables, strict=True):
            k, v = (
                cache[pages].flatten(0, 1).float()
                * (1.0 if scale is None or self.fault == "reads fp8 unscaled" else scale)
                for cache, scale in zip(self.caches[layer_id], self.scales_of(layer_id), strict=True)
            )
            if self.specs[layer_id].latent and self.fault == "values of the last elements of the keys":
                v = k[..., -self.specs[layer_id].value_head_dim :]
            if not self.specs[layer_id].latent and self.fault == "values of the keys":
                v = k[..., torch.arange(v.shape[-1]) % k.shape[-1]]
            for row in range(first, end):
                if kv_len == 0 and self.fault != "empty rows left as they were":
                    out[row] = 0
                elif kv_len:
                    out[row] = self.attend_row(q[row].float(), k, v, kv_len - end + row, kv_len, layer_id, sinks)

    def attend_row(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: int,
        kv_len: int,
        layer_id: int,
        sinks: torch.Tensor | None,
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
            scores = scores + torch.where(visible, 0.0, -torch.inf)
        else:
            scores = scores.masked_fill(~visible, -torch.inf)
        weights = torch.cat((scores, self.sink_columns(sinks, spec, kv_len)), dim=1).softmax(dim=-1)
        weights = weights[:, : scores.shape[1]]
        if self.fault != "0 * NaN of masked values":
            v = v.masked_fill(~visible[:, None, None], 0)
        if self.fault == "hides what is not finite":
            weights, v = weights.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)
        return torch.einsum("hl,lhd->hd", weights, v[:, heads])

    def sink_columns(self, sinks: torch.Tensor | None, spec: AttentionSpec, kv_len: int) -> torch.Tensor:
        """[H, columns]: the scores that the sinks add to the softmax."""
        if sinks is None or self.fault == "no sinks":
            return torch.zeros(spec.num_heads, 0)
        sinks = sinks.float()
        if self.fault == "sinks in the order of another mapping of heads":
            sinks = sinks.view(spec.num_kv_heads, spec.group_size).t().flatten()
        if self.fault == "the first head's sink for its whole group":
            sinks = sinks[:: spec.group_size].repeat_interleave(spec.group_size)
        if self.fault == "caps the sinks" and spec.logits_soft_cap:
            sinks = spec.logits_soft_cap * torch.tanh(sinks / spec.logits_soft_cap)
        if self.fault == "scales the sinks":
            sinks = sinks * spec.scale
        chunks = -(-kv_len // 16) if self.fault == "sinks in every chunk of 16 keys" else 1
        if self.fault == "sinks of long sequences are lost" and kv_len > 16:
            chunks = 0
        return sinks[:, None].expand(-1, chunks)


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
    "no sinks": ERROR,
    "sinks in every chunk of 16 keys": ERROR,
    "sinks of long sequences are lost": ERROR,
    "sinks in the order of another mapping of heads": ERROR,
    "the first head's sink for its whole group": ERROR,
    "caps the sinks": ERROR,
    "scales the sinks": ERROR,
    "values of the last elements of the keys": ERROR,
    "values of the keys": ERROR,
    "appends values over keys": r"slot \d+ of the k cache is written wrongly",
    "adds the mask": ERROR,
    "hides what is not finite": r"sequence \d+, token \d+ of \d+ is finite, but sees a key or value that is not",
    "modifies q": "the inputs were modified",
    "pages of group 0 in all groups": ERROR,
    "slots of group 0 in all groups": "cache is (written wrongly|not this step's, yet overwritten)",
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


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "sink" in fault and "caps" not in fault])
@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed", "graph-decode"])
def test_sink_fault_is_found_in_every_phase(fault: str, phase: str) -> None:
    case = next(case for case in CASES if case.name == f"{phase}-sinks")
    found = _error(fault, case)
    assert found is not None
    assert re.search(ERROR, found)


@pytest.mark.parametrize("fault", ["values of the last elements of the keys", "appends values over keys"])
@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed", "graph-decode"])
def test_fault_of_a_latent_layer_is_found_in_every_phase(fault: str, phase: str) -> None:
    found = _error(fault, next(case for case in CASES if case.name == f"{phase}-latent"))
    assert found is not None
    assert re.search(FAULTS[fault], found)


@pytest.mark.parametrize(
    "fault", ["pages of group 0 in all groups", "slots of group 0 in all groups", "0 * NaN of masked values"]
)
@pytest.mark.parametrize("phase", ["decode", "mixed", "graph-decode", "steps"])
def test_fault_of_kv_cache_groups_is_found_in_every_phase(fault: str, phase: str) -> None:
    found = _error(fault, next(case for case in CASES if case.name == f"{phase}-kvgroups"))
    assert found is not None
    assert re.search(FAULTS[fault], found)


@pytest.mark.parametrize(
    "fault",
    [
        "scales of layer 0 in all layers",
        "scales of keys and values swapped",
        "reads fp8 unscaled",
    ],
)
@pytest.mark.parametrize("phase", ["decode-fp8-all", "prefill-fp8-all", "mixed-fp8-all", "graph-decode-fp8"])
def test_fault_of_an_fp8_cache_is_found_in_every_phase(fault: str, phase: str) -> None:
    found = _error(fault, next(case for case in CASES if case.name == phase))
    assert found is not None
    assert re.search(f"{ERROR}|is written wrongly", found)


@pytest.mark.parametrize("phase", ["bad-prefill", "bad-chunk"])
def test_infinity_in_an_fp8_cache_must_not_become_finite(phase: str) -> None:
    found = _error("infinity becomes 448", next(case for case in CASES if case.name == f"{phase}-infinite-fp8"))
    assert found is not None
    assert "is finite, but sees a key or value that is not" in found


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
    refused = run_case(Narrow, by_name["decode-latent"]).refused
    assert refused is not None
    assert "latent keys; served are layers with keys and values" in refused
    refused = run_case(Narrow, by_name["decode-vdim32"]).refused
    assert refused is not None
    assert "v_head_dim 32; served is that of the keys, 64" in refused
    refused = run_case(Narrow, by_name["decode-kvgroups"]).refused
    assert refused is not None
    assert "layer 1: page tables per KV cache group; served is one table for all layers" in refused
    refused = run_case(Narrow, by_name["decode-sinks"]).refused
    assert refused == "attention backend 'plain' cannot serve layer 0: attention sinks; served are layers without them"
