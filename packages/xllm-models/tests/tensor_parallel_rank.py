"""One rank of a tensor-parallel run: RANK SIZE RENDEZVOUS OUTPUT CHECKPOINT..., logits saved to OUTPUT."""

from __future__ import annotations

import sys

import torch
from paged_session import PagedSession, run_steps
from torch import distributed

from xllm_models import load_model
from xllm_models.ops import register_group, unregister_group


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, output, *directories = sys.argv[3:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    world = distributed.group.WORLD
    assert world is not None
    results = []
    models = [load_model(directory, tp_rank=rank, tp_size=size) for directory in directories]
    try:
        list(run_steps(models[0]))
    except RuntimeError as error:
        assert "no process group named 'tp'" in str(error)  # noqa: PT017
    else:
        raise AssertionError("ran without a registered group")
    register_group("tp", world)
    for model in models:
        results.append([(sequence, start, logits) for sequence, start, logits in run_steps(model)])
        # A step without tokens: the ranks meet all the same.
        (empty,) = PagedSession(model, num_sequences=1).step([(0, [])])
        assert empty.shape == (0, model.config.vocab_size)
    unregister_group("tp")
    distributed.destroy_process_group()
    torch.save(results, output)


if __name__ == "__main__":
    main()
