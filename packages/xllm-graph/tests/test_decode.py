"""DecodeGraphRunner: selection of logits rows, refused steps, and the order of host fills and plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

MakeSetup = Callable[..., Any]


def decode_step(setup: Any, num_seqs: int) -> tuple[Any, ...]:
    """Arguments of a decode step of new requests with a token each in the cache."""
    requests = [setup.harness.add() for _ in range(num_seqs)]
    for number in requests:
        setup.harness.step((number, 2))
    metadata, tokens, positions = setup.harness._build([(number, 1) for number in requests])
    return tokens, positions, metadata


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [(0, 1, 2), (2, 0), (1,), (), (0, 1, 2, 2, 1, 0, 1, 0, 1)])
def test_rows_in_any_order_and_number(make_setup: MakeSetup, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    """The same step gives the same logits for every logits_indices, also with more entries than the bucket."""
    setup = make_setup()
    step = decode_step(setup, 3)
    hidden = setup.decode.execute(*step, None).clone()
    indices = torch.tensor(rows, dtype=dtype, device=hidden.device)
    logits = setup.decode.execute(*step, indices)
    torch.testing.assert_close(logits, setup.model.compute_logits(hidden, indices), rtol=0, atol=1e-5)


def test_rows_of_a_larger_step_are_forgotten(make_setup: MakeSetup) -> None:
    """A step without logits_indices must not use those of an earlier step, which may exceed its bucket."""
    setup = make_setup()
    large, small = decode_step(setup, 8), decode_step(setup, 1)
    setup.decode.execute(*large, torch.full((8,), 7, dtype=torch.int32, device=large[0].device))
    hidden = setup.decode.execute(*small, None).clone()
    setup.decode.poison_inputs()
    assert torch.equal(setup.decode.execute(*small, None), hidden)


def test_logits_are_the_graphs_own_memory(make_setup: MakeSetup) -> None:
    setup = make_setup()
    step = decode_step(setup, 2)
    indices = torch.arange(2, dtype=torch.int32, device=step[0].device)
    first = setup.decode.execute(*step, indices).data_ptr()
    assert setup.decode.execute(*step, indices).data_ptr() == first


@pytest.mark.parametrize("num_seqs", [2, 4])
def test_tokens_of_another_step_than_the_metadata_are_refused(make_setup: MakeSetup, num_seqs: int) -> None:
    """Both fit one bucket, so padding would hide the difference."""
    setup = make_setup()
    tokens, positions, _ = decode_step(setup, 3)
    *_, metadata = decode_step(setup, num_seqs)
    with pytest.raises(ValueError, match=f"3 tokens; the metadata has slots for {num_seqs}"):
        setup.decode.execute(tokens, positions, metadata, None)


def test_other_numbers_of_tokens_and_sequences_are_refused(make_setup: MakeSetup) -> None:
    """The error is that of eager execution. A bucket of four would treat the third token as padding."""
    setup = make_setup()
    tokens, positions, three = decode_step(setup, 3)
    *_, two = decode_step(setup, 2)
    metadata = replace(two, slot_mapping=three.slot_mapping)
    message = "a decode step has one token per sequence: 3 tokens, 2 sequences"
    for runner in (setup.decode, setup.runners.eager):
        with pytest.raises(ValueError, match=message):
            runner.execute(tokens, positions, metadata, None)


@pytest.mark.parametrize("logits_in_graph", [True, False])
def test_results_ask_for_no_gradients(make_setup: MakeSetup, logits_in_graph: bool) -> None:
    """In any grad mode of the caller, since hosts change logits in place."""
    setup = make_setup(logits_in_graph=logits_in_graph)
    step = decode_step(setup, 2)
    assert setup.model.head.weight.requires_grad
    with torch.enable_grad():
        for indices in (None, step[0].new_zeros(1), step[0].new_zeros(9)):
            assert not setup.decode.execute(*step, indices).requires_grad


@pytest.mark.parametrize("plans_on_host", [True, False])
def test_host_fields_are_filled_before_the_plan_where_it_reads_them(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, plans_on_host: bool
) -> None:
    """Otherwise they are filled after the launch, while the device runs."""
    setup = make_setup(warm=False)
    monkeypatch.setattr(setup.backend, "plans_on_host", lambda phase: plans_on_host)
    setup.decode.warmup()
    plan = setup.backend.plan
    seen: list[list[int]] = []

    def spied(metadata: Any, *, graph: bool = False) -> None:
        seen.append(metadata.paged_kv_indptr_host.tolist())
        plan(step[2])  # any valid plan: the outputs are not checked

    for size in (3, 4):
        step = decode_step(setup, size)
        live = step[2].paged_kv_indptr_host.tolist()
        expected = live + live[-1:] * (4 - size)
        setup.decode.metadata.buffer("paged_kv_indptr_host").fill_(-1)
        with monkeypatch.context() as patch:
            patch.setattr(setup.backend, "plan", spied)
            patch.setattr(type(setup.backend), "plan_layout", setup.decode._captured[4].plan_layout)
            setup.decode.execute(*step, None)
        assert seen.pop() == (expected if plans_on_host else [-1] * 5)
        assert setup.decode.metadata.paged_kv_indptr_host.tolist() == expected
