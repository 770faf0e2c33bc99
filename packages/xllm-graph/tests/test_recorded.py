"""RecordedGraphRuntime alone: a replay runs the dispatched ops again, on the captured memory."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from xllm_graph import CaptureError, available_runtimes, create_runtime, runtime
from xllm_graph.recorded import RecordedGraphRuntime


@pytest.fixture
def recorded() -> RecordedGraphRuntime:
    return RecordedGraphRuntime("cpu")


def test_a_replay_reads_the_inputs_and_writes_the_outputs_again(recorded: RecordedGraphRuntime) -> None:
    x, total = torch.ones(3), torch.zeros(3)
    with recorded.session():
        recorded.begin()
        y = (x * 2).view(3, 1) + x
        total.add_(x)
        out = recorded.borrow(y)
        graph = recorded.end()
    del y
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert out.tolist() == [[3.0, 4.0, 5.0], [5.0, 6.0, 7.0], [7.0, 8.0, 9.0]]
    graph.replay()
    assert total.tolist() == [3.0, 5.0, 7.0]  # once in the capture, twice in replays
    assert len(graph) == 3  # the view is no work


def test_in_place_and_out_variants(recorded: RecordedGraphRuntime) -> None:
    x, out = torch.ones(4), torch.zeros(4)
    with recorded.session():
        recorded.begin()
        buffer = torch.empty(4)
        torch.mul(x, 3, out=buffer)
        buffer[1:3] = x[:2]
        out.copy_(buffer.neg_())
        graph = recorded.end()
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [-15.0, -5.0, -5.0, -15.0]


def test_unwritten_memory_is_poison(recorded: RecordedGraphRuntime) -> None:
    with recorded.session():
        recorded.begin()
        floats, integers = torch.empty(3), torch.empty(3, dtype=torch.int32)
        graph = recorded.end()
    for tensor in (floats, integers):
        tensor.zero_()
    graph.replay()
    assert torch.isnan(floats).all()
    assert integers.min() > 1 << 24


def test_memory_is_shared_within_a_graph_and_between_graphs(recorded: RecordedGraphRuntime) -> None:
    x = torch.ones(1024)
    outputs, graphs = [], []
    # Two blocks take turns: an even and an odd number of ops leave their results in different ones.
    for size, num_ops in ((1024, 10), (512, 10), (64, 11), (8, 11)):
        with recorded.session():
            recorded.begin()
            y = x[:size]
            for _ in range(num_ops):
                y = y + 1
            outputs.append((recorded.borrow(y), num_ops + 1))
            del y
            graphs.append(recorded.end())
        assert recorded.memory_bytes() <= 3 * 4096  # of ten results
    assert len({output.data_ptr() for output, _ in outputs}) == 2
    for graph, (output, value) in zip(graphs, outputs, strict=True):
        graph.replay()
        assert (output == value).all()
        others = [(other, value) for other, value in outputs if other.data_ptr() != output.data_ptr()]
        assert len(others) == 2
        assert not any((other == value).all() for other, value in others)


def test_a_value_that_a_later_graph_reads_survives_until_then(recorded: RecordedGraphRuntime) -> None:
    x = torch.ones(8)
    with recorded.session():
        recorded.begin()
        kept = x + 1
        temporary = kept * 2
        first = recorded.end()
        del temporary
        recorded.begin()
        out = recorded.borrow(kept * 3)
        second = recorded.end()
    del kept
    x.fill_(2)
    first.replay()
    second.replay()
    assert (out == 9).all()


def test_order_of_calls(recorded: RecordedGraphRuntime) -> None:
    with pytest.raises(RuntimeError, match="outside of a capture session"):
        recorded.begin()
    with recorded.session():
        with pytest.raises(RuntimeError, match="end was called without a capture"):
            recorded.end()
        recorded.begin()
        with pytest.raises(RuntimeError, match="inside of another capture"):
            recorded.begin()
    with recorded.session():  # the open capture of the last session is gone
        recorded.begin()
        recorded.end()


def test_nothing_is_refused_outside_of_a_capture(recorded: RecordedGraphRuntime) -> None:
    x = torch.ones(2)
    with recorded.session():
        assert x.tolist() == [1.0, 1.0]
        recorded.begin()
        with pytest.raises(CaptureError, match=r"tolist\(\) of a tensor.*test_recorded.py:\d+ in test_nothing"):
            x.tolist()
        recorded.end()
        assert x.sum().item() == 2.0


def test_runtimes_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"recorded", "cuda"} <= set(available_runtimes())
    with pytest.raises(ValueError, match=r"no graph runtime 'nope'; available are \['cuda', 'recorded'\]"):
        create_runtime("nope", "cpu")
    with pytest.raises(ValueError, match="CUDA graphs serve"):
        create_runtime("cuda", "cpu")
    with pytest.raises(ValueError, match="recorded graphs serve"):
        create_runtime("recorded", "meta")
    mine = EntryPoint("mine", "xllm_graph.recorded:RecordedGraphRuntime", runtime.ENTRY_POINT_GROUP)
    monkeypatch.setattr(runtime, "entry_points", lambda group: [mine])
    assert create_runtime("mine", "cpu").device.type == "cpu"
    again = EntryPoint("cuda", "x:y", runtime.ENTRY_POINT_GROUP)
    monkeypatch.setattr(runtime, "entry_points", lambda group: [again])
    with pytest.raises(ValueError, match="graph runtime 'cuda' is declared twice, the second time as x:y"):
        available_runtimes()
