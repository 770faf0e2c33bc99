"""Which backend serves which step: the measured table behind `auto`, and choices per phase written by users.

Owns the rules only. They read spec, dtype, device, phase and bucket (the padded number of sequences), never lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .backend import Phase

AUTO: Final = "auto"

# On CUDA: the last bucket of each range, and its backends, best first. From benchmarks/results/attention-h200.json
# (groups of 2 heads of 128, bf16; docs/attention.md shows it). For decode the sum over contexts of 128 to 32k decides:
# triton leads or is within 5 %, and plans in half the time. Prompts: equal at 1k, triton ahead at 8k, and it plans 100
# of them in a seventh of the time. Chunks: flashinfer is a quarter faster.
_TRITON_FIRST: Final = ("triton", "flashinfer", "torch")
CUDA: Final[dict[Phase, tuple[tuple[float, tuple[str, ...]], ...]]] = {
    Phase.DECODE: ((float("inf"), _TRITON_FIRST),),
    Phase.PREFILL: ((float("inf"), _TRITON_FIRST),),
    Phase.CHUNKED: ((float("inf"), ("flashinfer", "triton", "torch")),),
}
ELSEWHERE: Final[tuple[str, ...]] = ("torch",)


def preferences(device_type: str, phase: Phase, num_seqs: int) -> tuple[str, ...]:
    """Backends for such a step, best first. The first that is installed and serves the model is taken."""
    if device_type != "cuda":
        return ELSEWHERE
    return next(names for last, names in CUDA[phase] if num_seqs <= last)


def automatic(device_type: str, refusals: Mapping[str, str | None]) -> Callable[[Phase, int], str]:
    """The rule of `auto`.

    Args:
        device_type: of the caches.
        refusals: for every backend that `preferences` may name, why it cannot serve the model here; None if it can.

    Raises:
        ValueError: by the rule, when no backend can.
    """

    def choose(phase: Phase, num_seqs: int) -> str:
        names = preferences(device_type, phase, num_seqs)
        for name in names:
            if refusals[name] is None:
                return name
        reasons = "; ".join(f"{name!r}: {refusals[name]}" for name in names)
        raise ValueError(f"no attention backend can serve a {phase.value} step of this model here: {reasons}")

    return choose


def parse_choice(choice: str | Mapping[str, str]) -> dict[Phase, str] | str:
    """Reads a value of `attention_backend`: one name, or a name per phase.

    `"decode=triton,prefill=flashinfer"` and `{"decode": "triton", "prefill": "flashinfer"}` mean the same. A phase that
    is not named is `auto`, except that chunked takes what prefill takes.

    Raises:
        ValueError: an unknown or repeated phase, or an empty name.
    """
    if isinstance(choice, str):
        if "=" not in choice:
            return choice
        pairs = [tuple(part.strip() for part in entry.split("=", 1)) for entry in choice.split(",")]
    else:
        pairs = list(choice.items())
    phases = {phase.value: phase for phase in Phase}
    chosen: dict[Phase, str] = {}
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in phases or not pair[1]:
            raise ValueError(f"attention_backend has {'='.join(pair)!r}; write phase=name, phases are {sorted(phases)}")
        if phases[pair[0]] in chosen:
            raise ValueError(f"attention_backend names the phase {pair[0]!r} twice")
        chosen[phases[pair[0]]] = pair[1]
    if Phase.PREFILL in chosen:
        chosen.setdefault(Phase.CHUNKED, chosen[Phase.PREFILL])
    return {phase: chosen.get(phase, AUTO) for phase in Phase}
