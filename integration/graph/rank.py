"""One rank of a tensor-parallel model under graphs: runs the conformance suite, prints its statistics as JSON.

python rank.py RANK SIZE RENDEZVOUS_FILE CUT_OPS
"""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed

from xllm_executor import ModelExecutor
from xllm_graph.conformance import SCENARIOS, Limits, World
from xllm_metadata import LayerCache
from xllm_models import TensorParallel, get_model_class
from xllm_models.ops import register_group, unregister_group

CONFIG = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
LIMITS = Limits(max_num_seqs=8, max_num_tokens=16, max_model_len=24, page_size=4, num_blocks=64, vocab_size=131)


def make_executor(rank: int, size: int, **options: object) -> tuple[ModelExecutor, list[LayerCache]]:
    model = get_model_class("llama")(CONFIG, dtype=torch.float32, tp=TensorParallel(rank=rank, size=size))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(values + 1 if parameter.dim() == 1 else values)
    limits = {"max_tokens_per_batch": LIMITS.max_num_tokens, "max_model_len": LIMITS.max_model_len}
    executor = ModelExecutor(model, limits | options, LIMITS.max_num_seqs)
    shapes = [(LIMITS.num_blocks, LIMITS.page_size, s.num_kv_heads, s.head_dim) for s in model.attention_specs]
    caches = [LayerCache(k=torch.full(shape, torch.nan), v=torch.full(shape, torch.nan)) for shape in shapes]
    executor.bind_kv_caches(caches)
    executor.warmup()
    return executor, caches


@torch.no_grad()
def main(rank: int, size: int, rendezvous: str, cut_ops: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    register_group("tp", distributed.group.WORLD)
    executor, caches = make_executor(
        rank, size, python_graph_backend="recorded", eager_is_error=True, graph_cut_ops=cut_ops
    )
    truth, truth_caches = make_executor(rank, size)
    world = World(executor.execute, executor.runners, caches, truth.execute, truth_caches, limits=LIMITS, device="cpu")
    for scenario in SCENARIOS[-4:]:
        scenario(world)
        world.clear()
    stats = executor.stats()
    # Graphs first, then the group: they may hold its collectives.
    executor.shutdown()
    truth.shutdown()
    unregister_group("tp")
    distributed.destroy_process_group()
    graphs = {graph["runner"]: graph["num_graphs"] for graph in stats["graphs"]}
    sys.stdout.write(json.dumps({"steps": stats["steps"], "graphs": graphs}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
