"""`run_case`: runs a backend through a case and checks everything it does. Owns the checks and the tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from xllm_metadata import LayerCache

from ..backend import AttentionBackend, Phase
from ..limits import BackendLimits
from ..spec import AttentionSpec
from .case import CacheLayout, Case
from .harness import BackendHarness, StepInputs
from .reference import reference_attention

# Largest relative L2 error of one token and head against float64, on inputs rounded to the dtype.
TOLERANCES: Final = {
    torch.float64: 1e-6,  # a backend may keep its scores in fp32
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
_SAME_SIZE_INT: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class ConformanceError(AssertionError):
    """A backend deviates from the suite."""


class BackendFactory(Protocol):
    """Makes the backend under test: a subclass of `AttentionBackend`, or a partial of `create_backend`."""

    def __call__(self, specs: Sequence[AttentionSpec], limits: BackendLimits) -> AttentionBackend: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Result of a case. A refused case was not run."""

    max_error: float  # largest relative L2 error of a token and head
    refused: str | None = None  # the backend's reason


def run_case(factory: BackendFactory, case: Case, *, device: torch.device | str = "cpu") -> CaseResult:
    """Runs all steps of a case and checks outputs, caches, inputs and plan counts after each.

    Raises:
        ConformanceError: names case, step, layer and what deviates.
    """
    harness = BackendHarness(case, torch.device(device))
    limits = BackendLimits(
        device=harness.device,
        dtype=case.dtype,
        max_num_seqs=case.max_num_seqs,
        max_num_tokens=case.max_num_tokens,
        max_model_len=max(1, *case.final_lens),
        kv_groups=case.kv_groups,
    )
    try:
        backend = factory(case.specs, limits)
    except ValueError as error:
        return CaseResult(max_error=0.0, refused=str(error))
    if case.graph and Phase.DECODE not in backend.capabilities.full_graph_phases:
        return CaseResult(max_error=0.0, refused=f"{backend.name} has no decode in a full graph")
    try:
        backend.bind_kv_caches(harness.caches)
    except ValueError as error:
        if case.layout is CacheLayout.CONTIGUOUS:
            raise ConformanceError(f"{case.name}: contiguous caches are refused: {error}") from error
        return CaseResult(max_error=0.0, refused=str(error))
    max_error = 0.0
    for number, step in enumerate(case.steps):
        inputs = harness.next_step(step)
        counts = backend.plan_counts
        backend.plan(inputs.metadata, graph=case.graph)
        if backend.plan_counts != tuple(count + 1 for count in counts):
            raise ConformanceError(
                f"{case.name}, step {number}: plan_counts went from {counts} to {backend.plan_counts}; "
                "every group must be planned once"
            )
        for layer in range(len(case.windows)):
            where = f"{case.name}, step {number}, layer {layer}"
            max_error = max(max_error, _run_layer(backend, harness, inputs, layer, where))
    return CaseResult(max_error=max_error)


def _run_layer(backend: AttentionBackend, harness: BackendHarness, inputs: StepInputs, layer: int, where: str) -> float:
    cache = harness.caches[layer]
    expected = {name: tensor.clone() for name, tensor in cache.items()}
    qkv = inputs.qkv[layer]
    # A backend may overwrite the keys and values of bad tokens, as long as rows that see them are not finite.
    kept = torch.ones(qkv.shape[0], dtype=torch.bool)
    kept[inputs.bad_rows] = False
    untouched = qkv[kept]
    q, k, v = harness.split(qkv)
    live = inputs.live_rows.to(harness.device)
    harness.write(LayerCache(**expected), layer, inputs.slots[layer], k[live], v[live])
    out = q.new_full((*q.shape[:2], harness.case.value_head_dim), torch.nan)
    if harness.case.latent:
        v = torch.full_like(v, torch.nan)  # a backend that reads or appends it is found
    backend.run(q, k, v, out, layer, harness.sinks[layer])
    if not _same_bytes(qkv[kept], untouched):
        raise ConformanceError(f"{where}: the inputs were modified")
    _check_cache(cache, expected, inputs, layer, where)
    return _check_output(out.cpu(), q.cpu(), harness, inputs, layer, where)


def _check_cache(
    cache: LayerCache, expected: dict[str, torch.Tensor], inputs: StepInputs, layer: int, where: str
) -> None:
    """Live slots hold exactly the step's rows, except those of bad tokens; every other byte is what it was."""
    bad_slots, slots = inputs.bad_slots(layer).tolist(), inputs.slots[layer].tolist()
    for name, tensor in cache.items():
        if _same_bytes(tensor, expected[name]):
            continue
        page_size = tensor.shape[1]
        for slot in range(tensor.shape[0] * page_size):
            index = (slot // page_size, slot % page_size)
            if slot not in bad_slots and not _same_bytes(tensor[index], expected[name][index]):
                fault = "written wrongly" if slot in slots else "not this step's, yet overwritten"
                raise ConformanceError(f"{where}: slot {slot} of the {name} cache is {fault}")


def _check_output(
    out: torch.Tensor, q: torch.Tensor, harness: BackendHarness, inputs: StepInputs, layer: int, where: str
) -> float:
    """Live rows agree with the reference, all others are 0. Returns the largest error.

    A row is NaN or infinite in every head in which the reference is; its other heads are not checked.
    """
    dead = torch.ones(out.shape[0], dtype=torch.bool)
    dead[inputs.live_rows] = False
    if out[dead].count_nonzero():
        row = int(dead.nonzero()[out[dead].flatten(1).count_nonzero(dim=1).argmax()])
        raise ConformanceError(f"{where}: output row {row} belongs to no live token and is not 0")
    spec, tolerance = harness.case.specs[layer], TOLERANCES[harness.case.dtype]
    worst = 0.0
    for seq, first, num_tokens in inputs.rows:
        if num_tokens == 0:
            continue
        rows = slice(first, first + num_tokens)
        reference = reference_attention(q[rows], *harness.history[layer][seq], spec, harness.sinks[layer])
        error = (out[rows].double() - reference).norm(dim=-1) / reference.norm(dim=-1)  # [rows, H]
        bad = ~reference.isfinite().all(dim=-1)  # [rows, H]
        wrongly_finite = (bad & out[rows].isfinite().all(dim=-1)).any(dim=-1)
        if bool(wrongly_finite.any()):
            token = int(wrongly_finite.to(torch.int8).argmax())
            raise ConformanceError(
                f"{where}: sequence {seq}, token {token} of {num_tokens} is finite, but sees a key or value that is not"
            )
        error[bad.any(dim=-1)] = 0.0
        if not bool((error <= tolerance).all()):
            token, head = divmod(int((-error.nan_to_num(torch.inf)).argmin()), error.shape[1])
            raise ConformanceError(
                f"{where}: sequence {seq}, token {token} of {num_tokens}, head {head}: "
                f"relative error {float(error[token, head]):.3g} exceeds {tolerance}"
            )
        worst = max(worst, float(error.max()))
    return worst


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality: NaNs of equal bits are equal, zeros of unequal sign are not."""
    as_int = _SAME_SIZE_INT[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))
