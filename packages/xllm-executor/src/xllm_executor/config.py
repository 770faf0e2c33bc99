"""`ExecutorConfig`: the executor's options, parsed once from what the host passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Final

from xllm_graph import available_runtimes, compiler_names, parse_buckets

GRAPH_BACKENDS: Final = ("off", "cudagraphs", "piecewise", "recorded")
"""Values of `python_graph_backend` besides the names of graph runtimes and of torch.compile backends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """Options of a `ModelExecutor`.

    Attributes:
        python_graph_backend: how steps are captured. `off`: eager execution. `cudagraphs`: full CUDA graphs for decode,
            piecewise CUDA graphs for all other steps. `piecewise`: piecewise graphs for every step. `recorded`, or the
            name of another graph runtime: like `cudagraphs`, on that runtime. Any other value names a torch.compile
            backend.
        graph_runtime: the graph runtime of `piecewise`; empty means CUDA graphs.
        graph_buckets: numbers of sequences to capture decode graphs for, such as "1,2,4,8". Empty means 1, 2, 4, 8,
            then multiples of 16 until one holds max_seqs_per_batch; on a CPU the powers of two up to 32768 keys, which
            is the number of sequences times max_model_len. Larger decode steps run piecewise.
        graph_token_budget: largest number of tokens in a piecewise graph, rounded up to a bucket. Larger steps run
            eagerly. 0 means 8192, and 128 on a CPU: a capture computes a whole step, which takes long there.
        graph_cut_ops: comma-separated names of ops that cannot be captured, such as "xllm::silu_and_mul". Piecewise
            graphs are split at them and they run eagerly. Decode then runs piecewise too.
        graph_cut_collectives: splits piecewise graphs at every collective in the same way, for a process group whose
            backend cannot be captured, such as gloo on CUDA.
        logits_in_graph: whether decode graphs compute the logits; False for a host that asks for hidden states.
        eager_is_error: raise an error when graphs are enabled but no graph can run a step.
        progress: show the warm-up's progress on stderr: a bar on a terminal, else a line every two seconds and at the
            end. Without it these lines are log records.
        attention_backend: one of `xllm_attention.available_backends()`, a choice per phase such as
            "decode=triton,prefill=flashinfer", or `auto`, which chooses one for each step.
        kv_groups: the host gives each KV cache group of the model a page table of its own, so that it can free the
            pages of sliding windows; see the contract. False: one page table serves all layers.
        max_tokens_per_batch: largest number of tokens in a step.
        max_model_len: largest KV length of a sequence. 0 means the length that the model was loaded for, or else its
            max_position_embeddings.
        validate: check the metadata of every step against the contract, for debugging: it copies device tensors to the
            host and so synchronizes. The environment variable XLLM_VALIDATE=1 does the same.
    """

    python_graph_backend: str = "off"
    graph_runtime: str = ""
    graph_buckets: str = ""
    graph_token_budget: int = 0
    graph_cut_ops: str = ""
    graph_cut_collectives: bool = False
    logits_in_graph: bool = True
    eager_is_error: bool = False
    progress: bool = False
    attention_backend: str = "auto"
    kv_groups: bool = False
    max_tokens_per_batch: int = 8192
    max_model_len: int = 0
    validate: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        if self.graph_buckets:
            parse_buckets(self.graph_buckets)
        for name, least in (("max_tokens_per_batch", 1), ("graph_token_budget", 0), ("max_model_len", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def cut_ops(self) -> tuple[str, ...]:
        """The names in `graph_cut_ops`."""
        return tuple(name.strip() for name in self.graph_cut_ops.split(",") if name.strip())

    @property
    def runtime(self) -> str | None:
        """Name of the graph runtime; None for eager execution and torch.compile backends."""
        if self.python_graph_backend == "piecewise":
            return self.graph_runtime or "cuda"
        if self.python_graph_backend == "cudagraphs":
            return "cuda"
        return self.python_graph_backend if self.python_graph_backend in available_runtimes() else None

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

    def _check_names(self) -> None:
        runtimes = available_runtimes()
        if self.graph_runtime and self.graph_runtime not in runtimes:
            raise ValueError(f"graph_runtime is {self.graph_runtime!r}; available are {sorted(runtimes)}")
        if self.graph_runtime and self.python_graph_backend != "piecewise":
            raise ValueError(
                f"graph_runtime is {self.graph_runtime!r} with python_graph_backend {self.python_graph_backend!r}; "
                "only 'piecewise' takes it"
            )
        # Compiler names are looked up last: importing torch.compile takes a second or two.
        known = {*GRAPH_BACKENDS, *runtimes}
        if self.python_graph_backend not in known and self.python_graph_backend not in compiler_names():
            raise ValueError(
                f"python_graph_backend is {self.python_graph_backend!r}; available are {sorted(known)} and the "
                f"torch.compile backends {sorted(compiler_names(debugging=False))}"
            )
