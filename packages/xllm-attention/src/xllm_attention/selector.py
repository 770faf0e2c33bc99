"""Selects the attention backend of each phase: the measured order of `auto`, and the option `attention_backend`.

Owns the rules only; `registry` loads the backends. A rule reads spec, dtype, device and phase, never the lengths or the
size of a step. So every step of a phase gets the same backend, and captured graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .backend import Phase

AUTO: Final = "auto"

# Best first, from benchmarks/results/attention-h200.json (16 heads over 8 KV heads of 128, bf16; docs/attention.md).
# Decode: summed over contexts of 128 to 32k, triton is the faster one or within 2 %, and its plan takes 21 to 28 us
# instead of 125 to 204. Prefill: triton takes 138 us for 8 prompts of 1k (flashinfer 145) and 660 for one of 8k (865).
# Chunked: flashinfer takes 205 us for 8 chunks of 512 (triton 245) and 41 for 4 tokens of 32 sequences (78).
AUTO_ORDER_CUDA: Final[Mapping[Phase, tuple[str, ...]]] = {
    Phase.DECODE: ("triton", "flashinfer", "torch"),
    Phase.PREFILL: ("triton", "flashinfer", "torch"),
    Phase.CHUNKED: ("flashinfer", "triton", "torch"),
}
AUTO_ORDER_OTHER_DEVICES: Final[Mapping[Phase, tuple[str, ...]]] = dict.fromkeys(Phase, ("torch",))


def auto_order(device_type: str) -> Mapping[Phase, tuple[str, ...]]:
    """The backends that `auto` tries in each phase, best first."""
    return AUTO_ORDER_CUDA if device_type == "cuda" else AUTO_ORDER_OTHER_DEVICES


def first_supported(phase: Phase, names: tuple[str, ...], refusals: Mapping[str, str | None]) -> str:
    """The first of `names` that can serve the model.

    Args:
        phase: for the message.
        names: best first.
        refusals: for each name, why that backend cannot serve the model on this machine; None if it can.

    Raises:
        ValueError: none can; lists the reasons.
    """
    for name in names:
        if refusals[name] is None:
            return name
    reasons = "; ".join(f"{name!r}: {refusals[name]}" for name in names)
    raise ValueError(f"no attention backend can serve a {phase.value} step of this model here: {reasons}")


def parse_attention_backend(option: str | Mapping[str, str]) -> dict[Phase, str] | str:
    """Reads a value of `attention_backend`: one name, or a name per phase.

    `"decode=triton,prefill=flashinfer"` and `{"decode": "triton", "prefill": "flashinfer"}` mean the same. A phase that
    is not named is `auto`, except that chunked takes what prefill takes.

    Raises:
        ValueError: an unknown or repeated phase, or an empty name.
    """
    if isinstance(option, str):
        if "=" not in option:
            return option
        pairs = [tuple(part.strip() for part in entry.split("=", 1)) for entry in option.split(",")]
    else:
        pairs = list(option.items())
    phases = {phase.value: phase for phase in Phase}
    selected: dict[Phase, str] = {}
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in phases or not pair[1]:
            raise ValueError(f"attention_backend has {'='.join(pair)!r}; write phase=name, phases are {sorted(phases)}")
        if phases[pair[0]] in selected:
            raise ValueError(f"attention_backend names the phase {pair[0]!r} twice")
        selected[phases[pair[0]]] = pair[1]
    if Phase.PREFILL in selected:
        selected.setdefault(Phase.CHUNKED, selected[Phase.PREFILL])
    return {phase: selected.get(phase, AUTO) for phase in Phase}
