"""The tensor-parallel process group: joined over the host's store, resolved by name, destroyed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch import distributed

from xllm_executor import tensor_parallel

RANK = """
import sys

import torch
from torch.distributed import distributed_c10d

from xllm_executor import tensor_parallel
from xllm_models import ops

rank, port, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
name = tensor_parallel.join(
    rank=rank, size=2, host="127.0.0.1", port=port, prefix="test", backend="", device="cpu", timeout=timeout
)
assert distributed_c10d._resolve_process_group(name).size() == 2
assert ops.all_reduce_(torch.tensor([rank + 1.0]), "tp").item() == 3.0
assert ops.group_stats() == {
    "tp": {
        "num_ranks": 2,
        "backend": "gloo",
        "all_reduce_algorithms": {"gloo": 1},
        "all_gather_algorithms": {},
        "transport": "gloo, because rank 0: device cpu has no symmetric memory",
    }
}
tensor_parallel.leave()
tensor_parallel.leave()  # without a group: does nothing
assert not torch.distributed.is_initialized()
"""


@pytest.fixture
def store() -> distributed.TCPStore:
    """A store that this process serves, as a host would."""
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(rank: int, port: int, timeout: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK, str(rank), str(port), str(timeout)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_two_ranks_join_and_leave(store: distributed.TCPStore) -> None:
    ranks = [start(rank, store.port, 60) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_missing_rank_is_waited_for_until_the_timeout(store: distributed.TCPStore) -> None:
    begin = time.monotonic()
    rank = start(0, store.port, 2)
    _, errors = rank.communicate(timeout=60)
    assert rank.returncode == 1, errors
    assert "DistStoreError" in errors, errors
    assert time.monotonic() - begin < 30


def test_a_rank_outside_of_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_rank 2 is outside the 2 ranks of tp_size"):
        tensor_parallel.join(rank=2, size=2, host="127.0.0.1", port=1, prefix="", backend="", device="cpu", timeout=1.0)


def test_a_group_that_exists_is_named(store: distributed.TCPStore) -> None:
    group = {"rank": 0, "size": 1, "host": "127.0.0.1", "port": store.port, "backend": "gloo", "device": "cpu"}
    tensor_parallel.join(**group, prefix="first", timeout=10.0)
    try:
        with pytest.raises(RuntimeError, match="this process is in a process group already; leave it before"):
            tensor_parallel.join(**group, prefix="second", timeout=10.0)
        assert distributed.is_initialized()
    finally:
        tensor_parallel.leave()


def test_a_join_that_fails_leaves_no_group(store: distributed.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a rank did not send its info")

    group = {"rank": 0, "size": 1, "host": "127.0.0.1", "port": store.port, "backend": "gloo", "device": "cpu"}
    with monkeypatch.context() as patch:
        patch.setattr(tensor_parallel, "choose_transport", fail)
        with pytest.raises(RuntimeError, match="a rank did not send its info"):
            tensor_parallel.join(**group, prefix="failed", timeout=10.0)
    assert not distributed.is_initialized()
    tensor_parallel.join(**group, prefix="again", timeout=10.0)
    tensor_parallel.leave()
