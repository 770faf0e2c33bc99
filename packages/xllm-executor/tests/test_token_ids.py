"""Token ids outside the vocabulary on several ranks: refused alike, and never answered where they are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from xllm_executor.token_ids import check_token_ids, reading_waits

# 97 ids on 2 ranks: id 97 is a padding row of the last rank. Rows 0 to 2 are one sequence and row 3 another.
RANK = """
import sys

import torch

from xllm_executor import ModelExecutor, executor, tensor_parallel
from xllm_metadata import allocate_caches, build_attention_metadata
from xllm_models import get_model_class
from xllm_models.layers import TensorParallel
from conftest import CONFIG

rank, port, checks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "checks"
tensor_parallel.join(
    rank=rank, size=2, host="127.0.0.1", port=port, prefix="ids", backend="gloo", device="cpu", timeout=60.0
)
if not checks:
    executor.reading_waits = lambda device: True
torch.manual_seed(rank)
model = get_model_class("llama")(CONFIG | {"n_layers": 2}, tp=TensorParallel(rank=rank, size=2, group="tp"))
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
model.weights_loaded = True
runner = ModelExecutor(model, {"python_graph_backend": sys.argv[4], "max_tokens_per_batch": 8}, 8)
runner.bind_kv_caches(allocate_caches(model.cache_specs, num_pages=16, page_size=4))
runner.warmup()
step = build_attention_metadata([3, 1], [3, 1], [[1], [2]], page_size=4)
positions = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
rows = torch.tensor([2, 3])
good = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
want = runner.execute(good, positions, step, rows).clone()
for row, token_id in [(0, -1), (2, 97), (1, 98), (3, 97), (3, 2**31 - 1), (2, -(2**31))]:
    tokens = good.clone()
    tokens[row] = token_id
    if checks:
        try:
            runner.execute(tokens, positions, step, rows)
            raise AssertionError("not refused")
        except ValueError as error:
            assert str(error) == f"tokens[{row}] is {token_id}; the vocabulary has 97 ids, 0 to 96", error
    else:
        got = runner.execute(tokens, positions, step, rows)
        wrong = int(row == 3)
        assert torch.isnan(got[wrong]).all()
        assert torch.equal(got[1 - wrong], want[1 - wrong])
assert torch.equal(runner.execute(good, positions, step, rows), want)
runner.shutdown()
tensor_parallel.leave()
"""


@pytest.mark.parametrize("backend", ["off", "recorded"])
@pytest.mark.parametrize("mode", ["checks", "does not check"])
def test_two_ranks(mode: str, backend: str) -> None:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store.port), mode, backend],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_edges_of_the_vocabulary(dtype: torch.dtype) -> None:
    for ids in ([], [0], [96], [96, 0, 50]):
        check_token_ids(torch.tensor(ids, dtype=dtype), 97)
    for ids, wrong in [([97], r"tokens\[0\] is 97"), ([0, -1, 97], r"tokens\[1\] is -1")]:
        with pytest.raises(ValueError, match=f"{wrong}; the vocabulary has 97 ids, 0 to 96"):
            check_token_ids(torch.tensor(ids, dtype=dtype), 97)


def test_reading_waits_on_every_device_but_the_cpu() -> None:
    assert [reading_waits(torch.device(name)) for name in ("cpu", "cuda", "meta")] == [False, True, True]
