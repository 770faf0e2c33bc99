"""Granite for xllm_models, found by its entry points."""

from __future__ import annotations

from .granite import GraniteForCausalLM

__all__ = ["GraniteForCausalLM"]
