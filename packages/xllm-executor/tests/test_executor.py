"""ModelExecutor: order of calls, results and counters of a step, and refused inputs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from xllm_attention import BackendLimits, create_backend, forward_context
from xllm_executor import ExecutorConfig, ModelExecutor
from xllm_metadata import LayerCache, build_attention_metadata
from xllm_models import CausalLM

Caches = Callable[[CausalLM], list[tuple[torch.Tensor, torch.Tensor]]]
STEP = build_attention_metadata([3, 1], [3, 1], [[1], [2]], page_size=4)
TOKENS = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
POSITIONS = torch.tensor([0, 1, 2, 0], dtype=torch.int32)


def make_executor(model: CausalLM, make_caches: Caches, **config: Any) -> ModelExecutor:
    executor = ModelExecutor(model, config, 8)
    executor.bind_kv_caches(make_caches(model))
    return executor


def direct(model: CausalLM, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The step without the executor."""
    backend = create_backend(
        "torch",
        model.layer_specs,
        BackendLimits(
            device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=8, max_num_tokens=16, max_model_len=64
        ),
    )
    backend.bind_kv_caches([LayerCache(k=k, v=v) for k, v in caches])
    backend.plan(STEP)
    with forward_context(backend):
        return model(TOKENS, POSITIONS)


def test_hidden_states_and_logits(model: CausalLM, make_caches: Caches) -> None:
    hidden = direct(model, make_caches(model))
    executor = make_executor(model, make_caches)
    assert torch.equal(executor.execute(TOKENS, POSITIONS, STEP), hidden)
    indices = torch.tensor([2, 3])
    logits = executor.execute(TOKENS, POSITIONS, STEP, indices)
    assert torch.equal(logits, model.compute_logits(hidden, indices))
    assert logits.shape == (2, 97)
    assert executor.execute(TOKENS, POSITIONS, STEP, indices.int()[:0]).shape == (0, 97)


def test_results_may_be_changed_in_place(model: CausalLM, make_caches: Caches) -> None:
    logits = make_executor(model, make_caches).execute(TOKENS, POSITIONS, STEP, torch.tensor([2]))
    logits.div_(0.7)
    assert not logits.requires_grad


def test_one_plan_a_step_whatever_the_number_of_layers(model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(model, make_caches)
    executor.warmup()
    assert executor.stats()["plans"] == [0]
    for steps in range(1, 4):
        executor.execute(TOKENS, POSITIONS, STEP)
        assert executor.stats()["plans"] == [steps]
    assert len(model.layer_specs) == 28
    assert executor.stats()["steps"] == {"eager": 3}
    assert executor.stats()["eager_reasons"] == {"graphs_off": 3}


def test_plans_of_steps_before_the_warmup_stay_counted(model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(model, make_caches)
    executor.execute(TOKENS, POSITIONS, STEP)
    executor.warmup()
    assert executor.stats()["plans"] == [1]
    executor.execute(TOKENS, POSITIONS, STEP)
    assert (executor.stats()["plans"], executor.stats()["steps"]) == ([2], {"eager": 2})


def test_a_warmup_that_fails_is_not_counted(
    model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(model, make_caches)

    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(model.model, "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        executor.warmup()
    assert executor.stats()["plans"] == [0]


def test_warmup_writes_nothing(model: CausalLM, make_caches: Caches) -> None:
    caches = make_caches(model)
    executor = ModelExecutor(model, ExecutorConfig(), 8)
    executor.bind_kv_caches(caches)
    executor.warmup()
    assert all(torch.isnan(tensor).all() for layer in caches for tensor in layer)
    assert executor.stats()["steps"] == {}


def test_a_step_without_tokens(model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(model, make_caches, validate=True)
    empty = build_attention_metadata([], [], [], page_size=4)
    nothing = TOKENS[:0]
    assert executor.execute(nothing, nothing, empty).shape == (0, 32)
    assert executor.execute(nothing, nothing, empty, nothing).shape == (0, 97)


def test_the_order_of_calls(model: CausalLM, make_caches: Caches) -> None:
    executor = ModelExecutor(model, {}, 8)
    with pytest.raises(RuntimeError, match="execute was called before bind_kv_caches"):
        executor.execute(TOKENS, POSITIONS, STEP)
    with pytest.raises(RuntimeError, match="warmup was called before bind_kv_caches"):
        executor.warmup()
    executor.bind_kv_caches(make_caches(model))
    with pytest.raises(RuntimeError, match="an executor is bound once"):
        executor.bind_kv_caches(make_caches(model))
    executor.shutdown()
    executor.shutdown()
    for call in (
        executor.warmup,
        lambda: executor.execute(TOKENS, POSITIONS, STEP),
        lambda: executor.bind_kv_caches([]),
    ):
        with pytest.raises(RuntimeError, match="the executor was shut down"):
            call()


def test_a_refused_step_leaves_the_executor_usable(model: CausalLM, make_caches: Caches) -> None:
    executor = make_executor(model, make_caches, max_model_len=4)
    long = build_attention_metadata([1], [5], [[1, 2]], page_size=4)
    with pytest.raises(ValueError, match="max_seq_len 5 exceeds max_model_len 4"):
        executor.execute(TOKENS[:1], POSITIONS[:1], long)
    assert executor.execute(TOKENS, POSITIONS, STEP).shape == (4, 32)
    assert executor.stats()["steps"] == {"eager": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TOKENS.long(), POSITIONS, STEP), r"tokens is \[4\] int64; it must be \[T\] int32"),
        (
            (TOKENS, torch.zeros(3, 4).int(), STEP),
            r"positions is \[3, 4\] int32; multi-axis positions are not supported",
        ),
        ((TOKENS, POSITIONS[:3], STEP), r"positions is \[3\] int32; it must be \[4\] int32, as tokens"),
        (
            (TOKENS, POSITIONS, STEP, torch.zeros(2)),
            r"logits_indices is \[2\] float32; it must be \[n\] int32 or int64",
        ),
        ((TOKENS.to("meta"), POSITIONS, STEP), "tokens is on device meta; it must be on cpu"),
        ((TOKENS, POSITIONS.to("meta"), STEP), "positions is on device meta; it must be on cpu"),
        (
            (TOKENS, POSITIONS, STEP, torch.zeros(2, dtype=torch.int64, device="meta")),
            "logits_indices is on device meta; it must be on cpu",
        ),
        ((TOKENS, POSITIONS, STEP, None, torch.zeros(4, 32)), "inputs_embeds is not supported by this version"),
        ((TOKENS[:3], POSITIONS[:3], STEP), "metadata.slot_mapping has 4 entries and tokens 3; they must be equal"),
        (
            (TOKENS, POSITIONS, build_attention_metadata([3], [3], [[1]], page_size=4)),
            "metadata.slot_mapping has 3 entries and tokens 4; they must be equal",
        ),
        *(
            ((TOKENS, POSITIONS, replace(STEP, **{name: None})), f"{name} is None; it must be a tensor in this step")
            for name in ("slot_mapping", "kv_seq_lens_host", "paged_kv_last_page_len_host")
        ),
        (
            (TOKENS, POSITIONS, replace(STEP, qo_indptr=None)),
            "qo_indptr or qo_indptr_host is None; a prefill step must",
        ),
    ],
)
def test_inputs_that_are_refused(
    model: CausalLM, make_caches: Caches, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_executor(model, make_caches).execute(*arguments)


def test_validation_is_switched_by_config_and_environment(
    model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = build_attention_metadata([3, 1], [3, 1], [[1], [99]], page_size=4)
    with pytest.raises(ValueError, match=r"paged_kv_indices\[1\] is 99; the cache has pages 0 to 15"):
        make_executor(model, make_caches, validate=True).execute(TOKENS, POSITIONS, wrong)
    monkeypatch.setenv("XLLM_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"paged_kv_indices\[1\] is 99"):
        make_executor(model, make_caches).execute(TOKENS, POSITIONS, wrong)


@pytest.mark.parametrize(
    ("tokens", "positions", "metadata", "indices", "message"),
    [
        (TOKENS, POSITIONS + 1, STEP, None, r"positions\[0\] is 1; sequence 0, of KV length 3, has position 0 there"),
        (TOKENS, POSITIONS, STEP, torch.tensor([4]), r"logits_indices\[0\] is 4; the step has rows 0 to 3"),
        (TOKENS[:3], POSITIONS[:3], STEP, None, "slot_mapping has 4 entries; T is 3"),
        (TOKENS, POSITIONS, replace(STEP, paged_kv_last_page_len_host=None), None, "paged_kv_last_page_len_host is"),
    ],
)
def test_validation_covers_all_inputs_of_a_step(
    model: CausalLM,
    make_caches: Caches,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    metadata: Any,
    indices: torch.Tensor | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        make_executor(model, make_caches, validate=True).execute(tokens, positions, metadata, indices)


OUTSIDE = [(0, -1), (3, 97), (1, 98), (2, 2**31 - 1), (3, -(2**31))]


@pytest.mark.parametrize("backend", ["off", "recorded"])
@pytest.mark.parametrize(("row", "token_id"), OUTSIDE)
def test_a_token_id_outside_the_vocabulary(
    small_model: CausalLM, make_caches: Caches, row: int, token_id: int, backend: str
) -> None:
    executor = make_executor(small_model, make_caches, python_graph_backend=backend, max_tokens_per_batch=8)
    executor.warmup()
    tokens = TOKENS.clone()
    tokens[row] = token_id
    with pytest.raises(ValueError, match=rf"^tokens\[{row}\] is {token_id}; the vocabulary has 97 ids, 0 to 96$"):
        executor.execute(tokens, POSITIONS, STEP, torch.tensor([2, 3]))
    assert executor.stats()["plans"] == [0]
    tokens[row] = 96
    assert not torch.isnan(executor.execute(tokens, POSITIONS, STEP, torch.tensor([2, 3]))).any()


def test_the_first_of_several_wrong_ids_is_named(small_model: CausalLM, make_caches: Caches) -> None:
    tokens = torch.tensor([5, 97, -1, 99], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"tokens\[1\] is 97; the vocabulary has 97 ids"):
        make_executor(small_model, make_caches).execute(tokens, POSITIONS, STEP)


def test_ids_on_another_device_are_checked_with_validate_only(
    small_model: CausalLM, make_caches: Caches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading such a tensor waits for the device. Without the check, torch's embedding refuses the id here."""
    monkeypatch.setattr("xllm_executor.executor.reading_waits", lambda device: True)
    tokens = torch.tensor([5, 97, 7, 8], dtype=torch.int32)
    with pytest.raises(IndexError):
        make_executor(small_model, make_caches).execute(tokens, POSITIONS, STEP)
    with pytest.raises(ValueError, match=r"tokens\[1\] is 97; the vocabulary has 97 ids"):
        make_executor(small_model, make_caches, validate=True).execute(tokens, POSITIONS, STEP)


def test_a_context_longer_than_the_model_is_refused(small_model: CausalLM) -> None:
    with pytest.raises(ValueError, match="max_model_len 129 exceeds the model's 128 positions"):
        ModelExecutor(small_model, {"max_model_len": 129}, 8)
    short = type(small_model)(replace(small_model.config, max_model_len=16))
    with pytest.raises(ValueError, match="max_model_len 17 exceeds the model's 16 positions"):
        ModelExecutor(short, {"max_model_len": 17}, 8)


def test_the_context_is_what_the_model_was_made_for(small_model: CausalLM, make_caches: Caches) -> None:
    """The rotary tables end there; a step beyond them would read out of bounds."""
    short = type(small_model)(replace(small_model.config, max_model_len=16))
    short.weights_loaded = True  # any values do
    executor = make_executor(short, make_caches)
    step = build_attention_metadata([1], [17], [[1, 2, 3, 4, 5]], page_size=4)
    with pytest.raises(ValueError, match="max_seq_len 17 exceeds max_model_len 16"):
        executor.execute(TOKENS[:1], torch.tensor([16], dtype=torch.int32), step)


def test_positions_that_the_rope_adds_may_be_asked_for(small_model: CausalLM) -> None:
    rope = replace(small_model.config.rope, rope_type="dynamic", factor=2.0, original_max_position_embeddings=128)
    longer = type(small_model)(replace(small_model.config, rope=rope))
    ModelExecutor(longer, {"max_model_len": 256}, 8)
    with pytest.raises(ValueError, match="max_model_len 257 exceeds the model's 256 positions"):
        ModelExecutor(longer, {"max_model_len": 257}, 8)


def test_an_fp8_cache_is_refused(model: CausalLM, make_caches: Caches) -> None:
    caches = [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in make_caches(model)]
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        ModelExecutor(model, {}, 8).bind_kv_caches(caches)


def test_another_number_of_caches_or_tensors_is_refused(model: CausalLM, make_caches: Caches) -> None:
    """A host passes the tensors of a layer in the order of `cache_specs`."""
    caches: list[Any] = make_caches(model)
    executor = ModelExecutor(model, {}, 8)
    with pytest.raises(ValueError, match="a layer's cache has 3 tensors; it needs 2: k, v"):
        executor.bind_kv_caches([(*caches[0], torch.zeros(4, 3)), *caches[1:]])
    with pytest.raises(ValueError, match=f"{len(caches) - 1} caches for {len(caches)} layers; every layer needs one"):
        executor.bind_kv_caches(caches[1:])
    executor.bind_kv_caches(make_caches(model))


def test_shutdown_lets_the_model_go(model: CausalLM, make_caches: Caches) -> None:
    other = copy.deepcopy(model)
    executor = make_executor(other, make_caches)
    reference = weakref.ref(other)
    del other
    gc.collect()
    assert reference() is not None
    executor.shutdown()
    gc.collect()
    assert reference() is None
