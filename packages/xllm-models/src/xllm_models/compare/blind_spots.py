"""Finds mistakes that a comparison cannot show with these weights or this prompt."""

from __future__ import annotations

from collections.abc import Iterator

from ..causal_lm import CausalLM


def blind_spots(model: CausalLM, num_tokens: int) -> Iterator[str]:
    """One sentence per kind of mistake that a comparison of `num_tokens` tokens of this checkpoint cannot show."""
    constant = [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and parameter.numel() > 1 and bool((parameter == parameter[0]).all())
    ]
    if constant:
        more = f" and {len(constant) - 1} more" if len(constant) > 1 else ""
        yield f"{constant[0]}{more} have the same value everywhere: a port that ignores them may pass"
    windows = {spec.sliding_window for spec in model.attention_specs if spec.sliding_window >= num_tokens}
    if windows:
        listed = ", ".join(map(str, sorted(windows)))
        yield f"no query of {num_tokens} tokens leaves a sliding window of {listed}: a longer prompt compares windows"
