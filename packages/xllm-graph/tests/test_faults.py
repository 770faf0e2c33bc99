"""Faults that graphs hide, planted one by one: a named check of a named scenario must find each."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from xllm_graph import CaptureError, EagerReason
from xllm_graph.conformance import SCENARIOS, Check, ConformanceError, Scenario
from xllm_graph.inputs import TokenInputs
from xllm_metadata import FIELDS, StaticAttentionMetadata

MakeSetup = Callable[..., Any]


@pytest.fixture
def runtime_and_device() -> tuple[str, str]:
    """Recorded graphs only: an access out of bounds would end the process's use of a device."""
    return "recorded", "cpu"


BY_NAME: dict[str, Scenario] = {scenario.__name__: scenario for scenario in SCENARIOS}  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Cause:
    """The error of a step that raises: its type, its message, and the function of the package that it comes from."""

    error: type[Exception]
    message: str
    function: str


# The harness poisons all inputs before a step: an index that a runner leaves out is out of bounds.
POISON_IN_REPLAY = Cause(IndexError, "index out of range in self|is out of bounds for dimension", "replay")
POISON_IN_PLAN = Cause(IndexError, "index out of range in self", "plan")
OTHER_PLAN_LAYOUT = Cause(RuntimeError, "planned bucket .*; its graph was captured as", "execute")


def assert_found(setup: Any, scenario: str, check: Check, cause: Cause | None = None) -> None:
    """The named check of the scenario fails. `cause` is required for a step that raises.

    An error of the planted code, in this file, is no finding.
    """
    with pytest.raises(ConformanceError) as caught:
        BY_NAME[scenario](setup.harness)
    assert caught.value.check is check, f"found by {caught.value.check}: {caught.value}"
    if check is not Check.STEP_RAISED:
        assert cause is None
        return
    assert cause is not None
    error = caught.value.__cause__
    assert type(error) is cause.error
    assert re.search(cause.message, str(error))
    functions: list[str] = []  # on the traceback, after the planted code if it is there
    for frame in traceback.extract_tb(error.__traceback__):
        functions = [] if frame.filename == __file__ else [*functions, frame.name]
    assert cause.function in functions, "raised in the planted code"


@pytest.mark.parametrize("error", [IndexError, ValueError, RuntimeError])
def test_an_error_of_the_planted_code_is_no_finding(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    setup = make_setup()

    def broken(self: TokenInputs, *args: Any) -> Any:
        raise error("index out of range in self")

    monkeypatch.setattr(TokenInputs, "copies", broken)
    for function in ("replay", "plan", "execute"):
        cause = Cause(error, "index out of range in self", function)
        with pytest.raises(AssertionError, match="raised in the planted code"):
            assert_found(setup, "shrinking_batches", Check.STEP_RAISED, cause)


def test_a_bug_of_the_planted_code_is_not_caught(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    monkeypatch.setattr(TokenInputs, "copies", lambda self, *args: self.no_such_attribute)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        BY_NAME["shrinking_batches"](setup.harness)


def test_an_error_of_eager_execution_is_no_finding(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)

    def broken(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the model raises")

    setup.model.forward = broken
    with pytest.raises(RuntimeError, match=r"^the model raises"):
        BY_NAME["shrinking_batches"](setup.harness)


TENSOR_FIELDS = [field.name for field in FIELDS if field.type.is_tensor and field.presence.value == "always"]
# Which check finds a field that keeps the poison. The others are PADDED_CONTRACT.
FOUND_BY: dict[str, tuple[Check, Cause | None]] = {
    "slot_mapping": (Check.STEP_RAISED, POISON_IN_REPLAY),
    "paged_kv_indptr": (Check.STEP_RAISED, POISON_IN_PLAN),
    "paged_kv_indices": (Check.STEP_RAISED, POISON_IN_REPLAY),
    "kv_cu_seq_lens": (Check.LOGITS, None),
}


@pytest.mark.parametrize("name", TENSOR_FIELDS)
def test_a_field_left_out_of_the_fill(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setup = make_setup()
    fill = StaticAttentionMetadata.fill

    def partial_fill(self: StaticAttentionMetadata, *args: Any, **kwargs: Any) -> None:
        before = self.buffer(name).clone()
        fill(self, *args, **kwargs)
        self.buffer(name).copy_(before)

    monkeypatch.setattr(StaticAttentionMetadata, "fill", partial_fill)
    assert_found(setup, "shrinking_batches", *FOUND_BY.get(name, (Check.PADDED_CONTRACT, None)))


@pytest.mark.parametrize(
    ("buffer", "scenario", "check", "cause"),
    [
        ("tokens", "shrinking_batches", Check.STEP_RAISED, POISON_IN_REPLAY),
        ("tokens", "chunk_sizes", Check.STEP_RAISED, POISON_IN_REPLAY),
        ("positions", "shrinking_batches", Check.LOGITS, None),
        ("positions", "chunk_sizes", Check.LOGITS, None),
        ("logits_indices", "selected_logits", Check.STEP_RAISED, POISON_IN_REPLAY),
    ],
)
def test_an_input_left_out_of_the_fill(
    make_setup: MakeSetup,
    monkeypatch: pytest.MonkeyPatch,
    buffer: str,
    scenario: str,
    check: Check,
    cause: Cause | None,
) -> None:
    setup = make_setup()
    copies = TokenInputs.copies

    def partial(self: TokenInputs, *args: Any) -> Any:
        own = getattr(self, buffer).data_ptr()
        return [pair for pair in copies(self, *args) if pair[0].data_ptr() != own]

    monkeypatch.setattr(TokenInputs, "copies", partial)
    assert_found(setup, scenario, check, cause)


@pytest.mark.parametrize("scenario", ["shrinking_batches", "chunk_sizes"])
def test_an_uncleared_tail(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    setup = make_setup()
    copies = TokenInputs.copies

    def live(self: TokenInputs, *args: Any) -> Any:
        return [pair for pair in copies(self, *args) if pair[1].data_ptr() == args[0].data_ptr() or pair[1] is args[1]]

    monkeypatch.setattr(TokenInputs, "copies", live)
    assert_found(setup, scenario, Check.STEP_RAISED, POISON_IN_REPLAY)


@pytest.mark.parametrize("scenario", ["shrinking_batches", "chunk_sizes"])
def test_a_baked_in_branch(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """A Python branch on the step: the capture takes one side, and replays repeat it."""
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
    assert_found(setup, scenario, Check.LOGITS)


@pytest.mark.parametrize("scenario", ["shrinking_batches", "chunk_sizes"])
def test_a_reallocated_input_buffer(make_setup: MakeSetup, scenario: str) -> None:
    setup = make_setup()
    for runner in (setup.decode, setup.piecewise):
        runner._inputs = TokenInputs(runner.buckets[-1], setup.backend.limits.device)
    assert_found(setup, scenario, Check.LOGITS)


def test_a_reallocated_metadata_buffer(make_setup: MakeSetup) -> None:
    """The torch backend copies the plan into its own static buffers, which a graph has captured."""
    setup = make_setup()
    setup.backend._append_buffers = None
    assert_found(setup, "shrinking_batches", Check.LOGITS)


@pytest.mark.parametrize(
    ("scenario", "check", "cause"),
    [
        ("other_lengths", Check.STEP_RAISED, OTHER_PLAN_LAYOUT),  # the plan of the prompt before
        ("shrinking_batches", Check.LOGITS, None),  # the plan of the last capture
    ],
)
def test_a_stale_plan(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, scenario: str, check: Check, cause: Cause | None
) -> None:
    setup = make_setup()
    plan = setup.backend.plan

    def stale(metadata: Any, *, graph: bool = False) -> None:
        if not graph:
            plan(metadata)

    monkeypatch.setattr(setup.backend, "plan", stale)
    assert_found(setup, scenario, check, cause)


def test_another_plan_layout_than_the_captured_one(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    request = setup.harness.add()
    setup.harness.step((request, 2))
    monkeypatch.setattr(type(setup.backend), "plan_layout", property(lambda self: "other"))
    message = "the step raised RuntimeError: .* planned bucket 1 as 'other'; its graph was captured as"
    with pytest.raises(ConformanceError, match=message) as caught:
        setup.harness.step((request, 1))
    assert caught.value.check is Check.STEP_RAISED


@pytest.mark.parametrize("scenario", ["shrinking_batches", "every_live_size"])
def test_a_padding_row_of_length_1(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
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
    assert_found(setup, scenario, Check.STEP_RAISED, POISON_IN_REPLAY)


def test_a_capture_that_never_happens(make_setup: MakeSetup) -> None:
    setup = make_setup(warm=False)
    assert_found(setup, "all_under_graphs", Check.EAGER_STEPS)
    reasons = setup.runners.stats.eager_reasons
    assert reasons[EagerReason.NOT_WARMED_UP.value] == sum(setup.runners.stats.steps.values())


def test_a_result_that_another_step_overwrites(make_setup: MakeSetup) -> None:
    """A model in which one graph reads an output of another graph."""
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
    assert_found(setup, "kinds_in_turn", Check.LOGITS)


def test_a_padding_row_that_writes_to_the_cache(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup()
    fill = StaticAttentionMetadata.fill
    last_slot = setup.harness.limits.num_pages * setup.harness.limits.page_size - 1

    def writing(self: StaticAttentionMetadata, metadata: Any, **kwargs: Any) -> None:
        fill(self, metadata, **kwargs)
        self.slot_mapping[metadata.slot_mapping.shape[0] :] = last_slot

    monkeypatch.setattr(StaticAttentionMetadata, "fill", writing)
    assert_found(setup, "shrinking_batches", Check.CACHE_UNTOUCHED)


def test_a_row_without_logits_that_is_not_computed(make_setup: MakeSetup) -> None:
    """Its keys and values are missing in the cache, which no logits of the step show."""
    setup = make_setup()
    execute = setup.harness._execute

    def saving(tokens: torch.Tensor, positions: torch.Tensor, metadata: Any, rows: torch.Tensor | None) -> Any:
        if rows is not None and not (metadata.is_prefill or metadata.is_chunked_prefill):
            tokens = torch.zeros_like(tokens).index_copy(0, rows, tokens[rows])
        return execute(tokens, positions, metadata, rows)

    setup.harness._execute = saving
    assert_found(setup, "selected_logits", Check.CACHE_CONTENTS)


def test_hidden_states_in_another_order(make_setup: MakeSetup) -> None:
    setup = make_setup()
    execute = setup.harness._execute

    def reversing(*step: Any) -> torch.Tensor:
        return execute(*step) if step[-1] is not None else execute(*step).flip(0)

    setup.harness._execute = reversing
    assert_found(setup, "selected_logits", Check.HIDDEN_STATES)


def test_another_greedy_token_within_the_tolerance(make_setup: MakeSetup) -> None:
    """The two largest logits are closer than the tolerance, and further apart than the error."""
    setup = make_setup(warm=False)
    gap, head = 4e-5, setup.model.head
    with torch.no_grad():
        head.weight[1] = head.weight[0]
        head.bias[:2] = torch.tensor([10, 10 - gap])
    setup.runners.warmup()
    execute = setup.harness._execute

    def swapping(*step: Any) -> torch.Tensor:
        logits = execute(*step).clone()
        logits[:, 0] -= 0.7 * gap
        logits[:, 1] += 0.7 * gap
        return logits

    setup.harness._execute = swapping
    assert_found(setup, "shrinking_batches", Check.GREEDY)


def test_a_rounding_of_the_graph_alone(make_setup: MakeSetup) -> None:
    """The error is within the tolerance of the unpadded step; the padded inputs must give the same bits."""
    setup = make_setup(warm=False)
    model = setup.model
    forward = type(model).forward

    def rounding(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return forward(model, tokens, positions) * (1 + 2e-6 * setup.runtime.recording())

    model.forward = rounding
    setup.runners.warmup()
    for scenario in ("shrinking_batches", "chunk_sizes"):
        assert_found(setup, scenario, Check.PADDED_BITS)
        setup.harness.clear()


def test_a_padding_row_that_is_not_finite(make_setup: MakeSetup) -> None:
    """A model that divides by the norm of attention's output, which is 0 in padding rows."""
    setup = make_setup(warm=False)

    def normalizing(attention: Any) -> Callable[..., torch.Tensor]:
        def forward(*qkv: torch.Tensor) -> torch.Tensor:
            out = attention(*qkv)
            return out / out.norm(dim=-1, keepdim=True)

        return forward

    for layer in setup.model.attn:
        layer.forward = normalizing(layer.forward)
    setup.runners.warmup()
    for scenario in ("every_live_size", "chunk_sizes"):
        assert_found(setup, scenario, Check.PADDED_FINITE)
        setup.harness.clear()


def test_logits_that_depend_on_the_chunks_of_a_prompt(make_setup: MakeSetup) -> None:
    """A model that gives all tokens of a step one position, under graphs as eagerly."""
    setup = make_setup(warm=False)
    model = setup.model
    forward = type(model).forward
    model.forward = lambda tokens, positions: forward(model, tokens, positions.max().expand_as(positions))
    setup.runners.warmup()
    assert_found(setup, "chunk_sizes", Check.CHUNKED_LOGITS)


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
