"""Functions that the ranks of a test run; `benchmarks/ranks.py` starts one process per rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import ranks
import torch
from torch import distributed

from xllm_executor.check import make_harness
from xllm_graph.conformance import SCENARIOS, Limits
from xllm_models import CausalLM, get_model_class
from xllm_models.ops import SymmetricTransport, TransportRule, group_stats, register_group, unregister_group

CONFIG = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
LIMITS = Limits(max_num_seqs=8, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=64, vocab_size=131)


class Setup:
    """A harness of two executors, with graphs and without, of this rank's shard of the model."""

    def __init__(self, context: ranks.RankContext, cut_collectives: bool) -> None:
        torch.set_num_threads(1)
        backend = "recorded" if context.device == "cpu" else "cudagraphs"
        options = {
            "python_graph_backend": backend,
            "eager_is_error": True,
            "graph_cut_collectives": cut_collectives,
            "attention_backend": "torch",
        }
        self.harness, self.executor, self.reference = make_harness(make_model(context), LIMITS, options)

    def shutdown(self) -> None:
        # Before the group ends, since graphs may hold its collectives.
        self.executor.shutdown()
        self.reference.shutdown()


@torch.no_grad()
def make_model(context: ranks.RankContext) -> CausalLM:
    model = get_model_class("llama")(CONFIG, dtype=torch.float32, device=context.device, tp=context.tp)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(values + 1 if parameter.dim() == 1 else values)
    model.weights_loaded = True
    return model


@torch.no_grad()
def conforms(context: ranks.RankContext, options: dict[str, Any]) -> dict[str, Any]:
    """Runs the conformance suite; returns this rank's statistics.

    Options: `cut_collectives`; `rule`, the limits of a `TransportRule` that replaces the measured one.
    """
    if options.get("rule"):
        _sum_by(options["rule"], context)
    setup = Setup(context, options["cut_collectives"])
    for scenario in SCENARIOS[-4:]:
        scenario(setup.harness)
        setup.harness.clear()
    stats = setup.executor.stats()
    setup.shutdown()
    graphs = {graph["runner"]: graph["num_graphs"] for graph in stats["graphs"]}
    group = group_stats()["tp"]
    return {
        "steps": stats["steps"],
        "graphs": graphs,
        "algorithms": sorted(group["all_reduce_algorithms"]),
        "gather_algorithms": sorted(group["all_gather_algorithms"]),
        "transport": group["transport"],
    }


@torch.no_grad()
def dies(context: ranks.RankContext, options: dict[str, Any]) -> None:
    """Decodes under graphs until it is killed. The last rank writes the time to the file `when`, then kills itself."""
    setup = Setup(context, False)
    request = setup.harness.add()
    setup.harness.step((request, 3))
    metadata, tokens, positions = setup.harness._build([(request, 1)])
    rows = torch.zeros(1, dtype=torch.int32, device=context.device)
    for step in range(1_000_000):
        setup.executor.execute(tokens, positions, metadata, rows).argmax().item()
        if step == 20 and context.tp.rank == context.tp.size - 1:
            Path(options["when"]).write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def waits(context: ranks.RankContext, options: dict[str, Any]) -> None:
    """Writes its process id to the file `who`, then sleeps."""
    Path(options["who"]).write_text(str(os.getpid()))
    time.sleep(60)


def _sum_by(limits: dict[str, int], context: ranks.RankContext) -> None:
    group = distributed.group.WORLD
    assert group is not None
    unregister_group("tp")
    transport = SymmetricTransport(group, torch.device(context.device), TransportRule(**limits))
    register_group("tp", group, transport, description=f"symmetric memory, {limits}")
