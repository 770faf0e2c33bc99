"""`ExecutorConfig`: the executor's options, parsed once from what the host passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Final

GRAPH_BACKENDS: Final = ("off",)
"""Values of `python_graph_backend` that this version serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Options of a `ModelExecutor`.

    Attributes:
        python_graph_backend: how steps are captured; one of `GRAPH_BACKENDS`.
        attention_backend: one of `xllm_attention.available_backends()`.
        max_tokens_per_batch: tokens of one step at most.
        max_model_len: KV length of a sequence at most; 0 takes the model's max_position_embeddings.
        validate: check every step's metadata against the contract. Reads device tensors back: for debugging.
            The environment variable XLLM_VALIDATE=1 does the same.
    """

    python_graph_backend: str = "off"
    attention_backend: str = "torch"
    max_tokens_per_batch: int = 8192
    max_model_len: int = 0
    validate: bool = False

    def __post_init__(self) -> None:
        if self.python_graph_backend not in GRAPH_BACKENDS:
            raise ValueError(
                f"python_graph_backend is {self.python_graph_backend!r}; this version serves {list(GRAPH_BACKENDS)}"
            )
        if self.max_tokens_per_batch < 1:
            raise ValueError(f"max_tokens_per_batch is {self.max_tokens_per_batch}; it must be at least 1")
        if self.max_model_len < 0:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 0")

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> ExecutorConfig:
        """Parses a host's options.

        Raises:
            ValueError: names every unknown key, or the first value of a wrong type or out of range.
        """
        types = {field.name: type(field.default) for field in fields(cls) if field.default is not MISSING}
        if unknown := sorted(set(options) - set(types)):
            raise ValueError(f"unknown executor options {unknown}; known are {sorted(types)}")
        for name, value in options.items():
            if type(value) is not types[name]:
                raise ValueError(f"executor option {name} is {value!r}; it must be of type {types[name].__name__}")
        return cls(**options)  # type: ignore[arg-type]
