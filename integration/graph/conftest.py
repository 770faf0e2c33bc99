"""Tiny random models of every family, and harnesses of two executors of them: one with graphs, one eager."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from xllm_executor import ModelExecutor
from xllm_executor.check import make_harness
from xllm_graph.conformance import Limits, ReplayHarness
from xllm_models import CausalLM, get_model_class

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "qwen3": {
        "model_type": "qwen3", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True,
    },
    "mistral": {  # every layer with a window
        "model_type": "mistral", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 7, "tie_word_embeddings": False,
    },
    "gemma3_text": {  # two attention groups
        "model_type": "gemma3_text", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 6, "rope_local_base_freq": 10000.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "tie_word_embeddings": True,
    },
    "gpt_oss": {  # attention sinks, and experts chosen on the device
        "model_type": "gpt_oss", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rope_scaling": {"rope_type": "default"}, "tie_word_embeddings": False,
    },
    "qwen3_moe": {  # experts chosen on the device
        "model_type": "qwen3_moe", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "qwen3_next": {  # layers with state
        "model_type": "qwen3_next", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1], "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False,
    },
    "olmo2": {
        "model_type": "olmo2", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "glm4": {  # norms after the blocks, an interleaved rotary embedding of half the features
        "model_type": "glm4", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "glm4_moe": {  # groups of experts, a shared expert, a dense first layer
        "model_type": "glm4_moe", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "use_qk_norm": True,
    },
}  # fmt: skip
COMMON = {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "float32"}
LIMITS = Limits(max_num_seqs=11, max_num_tokens=24, max_model_len=40, page_size=4, num_pages=140, vocab_size=131)


GPU_ASKED_FOR = os.environ.get("XLLM_GPU_TESTS") == "1"
FOLDERS = (Path(__file__).parents[2] / "benchmarks", Path(__file__).parent)

if not GPU_ASKED_FOR:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The graph runtime, device and attention backend of a test."""

    graph_backend: str
    graph_runtime: str
    device: str
    attention: str
    dtype: torch.dtype = torch.float32
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the models, where the attention asks for it


RECORDED = Target(graph_backend="recorded", graph_runtime="recorded", device="cpu", attention="torch")
CUDA = Target(graph_backend="cudagraphs", graph_runtime="cuda", device="cuda", attention="torch")
TARGETS = [
    pytest.param(RECORDED, id="recorded-torch"),
    pytest.param(CUDA, id="cuda-torch", marks=pytest.mark.gpu),
    pytest.param(replace(CUDA, attention="triton", changes={"head_dim": 32}), id="cuda-triton", marks=pytest.mark.gpu),
    pytest.param(
        replace(CUDA, attention="flashinfer", dtype=torch.float16, changes={"head_dim": 64}),
        id="cuda-flashinfer",
        marks=pytest.mark.gpu,
    ),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks or of this folder by name. Spawned processes can import it too."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """All targets."""
    value: Target = request.param
    return value


@pytest.fixture(params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    """The two families that run every scenario."""
    name: str = request.param
    return name


@pytest.fixture
def make_model() -> Callable[[str], CausalLM]:
    """Makes a model on the CPU."""
    return lambda family: random_model(family, RECORDED)


def random_model(family: str, target: Target, **changes: Any) -> CausalLM:
    """A model of the family with random weights."""
    config = MODELS[family] | COMMON | dict(target.changes) | changes
    model = get_model_class(family)(config, device=target.device, dtype=target.dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(values + 1 if parameter.dim() == 1 else values)
    model.weights_loaded = True
    return model


@dataclass(slots=True, kw_only=True)
class Setup:
    """A harness and the executor that it checks."""

    harness: ReplayHarness
    executor: ModelExecutor
    model: CausalLM


MakeSetup = Callable[..., Setup]


@pytest.fixture
def make_setup(target: Target) -> MakeSetup:
    """Makes a setup of a family; options go to the executor with graphs, `limits` to both, `changes` to the model."""
    return setup_maker(target)


@pytest.fixture(params=[target for target in TARGETS if target.marks])
def make_cuda_setup(request: pytest.FixtureRequest) -> MakeSetup:
    """`make_setup` for the targets on a CUDA device only."""
    return setup_maker(request.param)


@pytest.fixture
def make_interpreted_setup() -> MakeSetup:
    """`make_setup` on recorded graphs, with Triton's attention kernels in its interpreter."""
    return setup_maker(replace(RECORDED, attention="triton"))


def setup_maker(target: Target) -> MakeSetup:
    """The function that the fixtures return. The reference always attends with the torch backend."""

    def make(family: str, *, limits: Limits = LIMITS, changes: dict[str, Any] | None = None, **options: Any) -> Setup:
        model = random_model(family, target, **(changes or {}))
        graph = {"python_graph_backend": target.graph_backend, "eager_is_error": True} | options
        if graph["python_graph_backend"] == "piecewise":
            graph["graph_runtime"] = target.graph_runtime
        harness, executor, _ = make_harness(model, limits, {"attention_backend": target.attention} | graph)
        return Setup(harness=harness, executor=executor, model=model)

    return make
