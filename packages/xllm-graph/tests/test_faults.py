"""Faults of the kind that graphs hide, planted one by one: the suite must catch each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xllm_graph import CaptureError, EagerReason
from xllm_graph.conformance import SCENARIOS, ConformanceError, Scenario
from xllm_graph.inputs import TokenInputs
from xllm_metadata import FIELDS, StaticAttentionMetadata

MakeSetup = Callable[..., Any]


@pytest.fixture
def place() -> tuple[str, str]:
    """Recorded graphs only: on a device, an access out of bounds would end the process's use of it."""
    return "recorded", "cpu"


BY_NAME: dict[str, Scenario] = {scenario.__name__: scenario for scenario in SCENARIOS}  # type: ignore[attr-defined]


def caught(setup: Any, *names: str) -> None:
    """Every one of the named scenarios finds the fault, by a check or by an access out of bounds."""
    for name in names:
        with pytest.raises((ConformanceError, IndexError, ValueError, RuntimeError)):
            BY_NAME[name](setup.harness)


TENSOR_FIELDS = [field.name for field in FIELDS if field.type.is_tensor and field.presence.value == "always"]


@pytest.mark.parametrize("name", TENSOR_FIELDS)
def test_a_field_left_out_of_the_fill(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setup = make_setup()
    fill = StaticAttentionMetadata.fill

    def partial_fill(self: StaticAttentionMetadata, *args: Any, **kwargs: Any) -> None:
        before = self.buffer(name).clone()
        fill(self, *args, **kwargs)
        self.buffer(name).copy_(before)

    monkeypatch.setattr(StaticAttentionMetadata, "fill", partial_fill)
    caught(setup, "shrinking_batches")


@pytest.mark.parametrize("buffer", ["tokens", "positions", "rows"])
def test_an_input_left_out_of_the_fill(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, buffer: str) -> None:
    setup = make_setup()
    copies = TokenInputs.copies

    def partial(self: TokenInputs, *args: Any) -> Any:
        own = getattr(self, buffer).data_ptr()
        return [pair for pair in copies(self, *args) if pair[0].data_ptr() != own]

    monkeypatch.setattr(TokenInputs, "copies", partial)
    caught(setup, *("selected_logits",) if buffer == "rows" else ("shrinking_batches", "chunk_sizes"))


def test_an_uncleared_tail(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    copies = TokenInputs.copies

    def live(self: TokenInputs, *args: Any) -> Any:
        return [pair for pair in copies(self, *args) if pair[1].data_ptr() == args[0].data_ptr() or pair[1] is args[1]]

    monkeypatch.setattr(TokenInputs, "copies", live)
    caught(setup, "shrinking_batches", "chunk_sizes")


@pytest.mark.parametrize("scenario", ["shrinking_batches", "chunk_sizes"])
def test_a_baked_in_branch(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """A Python branch on the step at hand, which a capture can take one way only."""
    setup = make_setup(warm=False)
    model = setup.model
    forward = type(model).forward
    longest = [0]  # of the step that was planned last, as a model might peek at it
    plan = type(setup.backend)._plan_step

    def peeking_plan(self: Any, step: Any) -> None:
        longest[0] = step.metadata.max_seq_len
        plan(self, step)

    monkeypatch.setattr(type(setup.backend), "_plan_step", peeking_plan)
    model.forward = lambda tokens, positions: forward(model, tokens, positions) * (2 if longest[0] > 3 else 1)
    setup.runners.warmup()
    caught(setup, scenario)


def test_a_reallocated_input_buffer(make_setup: MakeSetup) -> None:
    setup = make_setup()
    for runner in (setup.decode, setup.piecewise):
        runner._inputs = TokenInputs(runner.buckets[-1], setup.backend.limits.device)
    caught(setup, "shrinking_batches", "chunk_sizes")


def test_a_reallocated_metadata_buffer(make_setup: MakeSetup) -> None:
    """The torch backend copies the plan to buffers of its own, so there it is those that must not move."""
    setup = make_setup()
    setup.backend._append_buffers = None
    caught(setup, "shrinking_batches")


def test_a_stale_plan(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    plan = setup.backend.plan

    def stale(metadata: Any, *, graph: bool = False) -> None:
        if not graph:
            plan(metadata)

    monkeypatch.setattr(setup.backend, "plan", stale)
    caught(setup, "other_lengths", "shrinking_batches")


def test_another_plan_layout_than_the_captured_one(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    request = setup.harness.add()
    setup.harness.step((request, 2))
    monkeypatch.setattr(type(setup.backend), "plan_layout", property(lambda self: "other"))
    with pytest.raises(RuntimeError, match="planned bucket 1 as 'other'; its graph was captured as"):
        setup.harness.step((request, 1))


def test_a_padding_row_of_length_1(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    fill = StaticAttentionMetadata.fill

    def long_rows(self: StaticAttentionMetadata, metadata: Any, *, num_seqs: int, **kwargs: Any) -> None:
        fill(self, metadata, num_seqs=num_seqs, **kwargs)
        live = metadata.kv_seq_lens_host.shape[0] - 1
        extra = torch.arange(1, num_seqs - live + 1, dtype=torch.int32)
        for lens in (self.kv_cu_seq_lens, self.kv_seq_lens_host):
            lens[live + 1 :] += extra.to(lens.device)
        for last in (self.paged_kv_last_page_len, self.paged_kv_last_page_len_host):
            last[live:] = 1

    monkeypatch.setattr(StaticAttentionMetadata, "fill", long_rows)
    caught(setup, "shrinking_batches", "every_live_size")


def test_a_capture_that_never_happens(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    with pytest.raises(ConformanceError, match="steps ran eagerly"):
        BY_NAME["all_under_graphs"](setup.harness)
    reasons = setup.runners.stats.eager_reasons
    assert reasons[EagerReason.NOT_WARMED_UP.value] == sum(setup.runners.stats.steps.values())


def test_a_result_that_another_step_overwrites(make_setup: MakeSetup) -> None:
    """A model that keeps what one of its graphs computed for another graph to read."""
    setup = make_setup(warm=False)
    model = setup.model
    forward = type(model).forward
    kept: list[torch.Tensor] = []

    def keeping(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = forward(model, tokens, positions)
        if kept and kept[0].shape[0] >= hidden.shape[0]:
            return hidden + kept[0][: hidden.shape[0]] * 0
        kept[:] = [setup.runtime.borrow(hidden.clone())]
        return hidden

    model.forward = keeping
    setup.runners.warmup()
    caught(setup, "kinds_in_turn")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("hidden.sum().item()", r"item\(\)"),
        ("hidden.tolist()", r"tolist\(\)"),
        ("hidden.numpy()", r"numpy\(\)"),
        ("hidden.cpu()", r"cpu\(\)"),
        ("str(hidden)", "str or repr"),
        ("f'{hidden.sum()}'", "format"),
        ("torch.from_dlpack(hidden)", "DLPack"),
        ("hidden.__array__()", "numpy array"),
        ("bool(hidden.sum() > 0)", r"bool\(\)"),
        ("int(tokens.sum())", r"int\(\)"),
        ("hidden.nonzero()", "aten.nonzero.default returns a shape that depends on values"),
        ("hidden[hidden > 0]", "shape that depends on values"),
        ("torch.equal(hidden, hidden)", "aten.equal.default"),
        ("hidden + torch.tensor([1.0])", "made of host values"),
        ("hidden.unique()", "shape that depends on values"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_with_its_line(make_setup: MakeSetup, line: str, what: str) -> None:
    setup = make_setup(warm=False)
    model = setup.model
    forward = type(model).forward
    namespace: dict[str, Any] = {"torch": torch, "forward": forward, "model": model}
    lines = ("hidden = forward(model, tokens, positions)", line, "return hidden")
    source = "def peeking(tokens, positions):\n" + "".join(f"    {each}\n" for each in lines)
    exec(compile(source, "/the/model.py", "exec"), namespace)
    model.forward = namespace["peeking"]
    with pytest.raises(CaptureError, match=rf"{what}.* \(at /the/model.py:3 in peeking"):
        setup.runners.warmup()
