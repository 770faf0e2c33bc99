"""A model with sliding windows whose host frees pages has the same logits as with one page table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from xllm_executor import ModelExecutor
from xllm_metadata import LayerCache, allocate_caches, build_attention_metadata
from xllm_models import CausalLM, get_model_class

PAGE_SIZE, WINDOW, MAX_LEN = 4, 8, 48
CONFIG = {
    "model_type": "gemma3_text", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "sliding_window": WINDOW, "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0, "rope_theta": 100000.0,
    "query_pre_attn_scalar": 8, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """Random weights."""
    torch.manual_seed(3)
    made = get_model_class("gemma3_text")(CONFIG, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    made.weights_loaded = True
    return made


def make(model: CausalLM, num_pages: list[int] | int, **config: object) -> tuple[ModelExecutor, list[LayerCache]]:
    """A warmed-up executor, and its caches, which are NaN."""
    options: dict[str, object] = {"max_tokens_per_batch": 16, "max_model_len": MAX_LEN, "validate": True, **config}
    executor = ModelExecutor(model, options, 4)
    caches = allocate_caches(model.cache_specs, num_pages=num_pages, page_size=PAGE_SIZE, fill=torch.nan)
    executor.bind_kv_caches(caches)
    executor.warmup()
    return executor, caches


def test_the_specs_name_group_and_window(model: CausalLM) -> None:
    found = [{(spec.group, spec.window) for spec in layer} for layer in model.cache_specs]
    assert found == [{(1, WINDOW)}, {(0, 0)}] * 2


@pytest.mark.parametrize("backend", ["off", "recorded"])
def test_freed_pages_change_no_logits(model: CausalLM, backend: str) -> None:
    """Three sequences of six windows, in chunks and then token by token, with five pages of the window each."""
    lengths = [MAX_LEN, 40, 11]
    tables = [[i * 12 + j for j in range(12)] for i in range(3)]
    one_table, _ = make(model, 36)
    grouped, caches = make(model, [36, 16], python_graph_backend=backend, kv_groups=True)
    free, windows = list(range(15)), [[] for _ in lengths]
    tokens = torch.randint(0, 97, (3, MAX_LEN), dtype=torch.int32, generator=torch.manual_seed(0))
    done = [0, 0, 0]
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = [(i, min(5 if at < 20 else 1, lengths[i] - at)) for i, at in enumerate(done) if at < lengths[i]]
        for i, count in parts:
            gone = max(0, done[i] - WINDOW + 1) // PAGE_SIZE
            freed = [page for page in windows[i][:gone] if page != 15]
            for layer, specs in zip(caches, model.cache_specs, strict=True):
                for _, tensor in layer.items() if specs[0].group else ():
                    tensor[freed] = torch.nan
            free += freed
            windows[i][:gone] = [15] * gone  # a page of NaN
            while len(windows[i]) * PAGE_SIZE < done[i] + count:
                windows[i].append(free.pop(0))
            done[i] += count
        step = build_attention_metadata(
            [count for _, count in parts],
            [done[i] for i, _ in parts],
            [tables[i] for i, _ in parts],
            PAGE_SIZE,
            group_page_tables=[[windows[i] for i, _ in parts]],
        )
        positions = [torch.arange(done[i] - count, done[i], dtype=torch.int32) for i, count in parts]
        ids = torch.cat([tokens[i, done[i] - count : done[i]] for i, count in parts])
        last = torch.tensor([count for _, count in parts]).cumsum(0) - 1
        plain = replace(step, group_slot_mapping=None, group_paged_kv_indices=None)
        expected = one_table.execute(ids, torch.cat(positions), plain, last)
        actual = grouped.execute(ids, torch.cat(positions), step, last)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    if backend == "recorded":
        assert set(grouped.stats()["steps"]) == {"piecewise", "decode_graph"}  # type: ignore[call-overload]


def test_validate_checks_the_pages_of_each_group(model: CausalLM) -> None:
    executor, _ = make(model, [36, 5], kv_groups=True)
    ids = torch.zeros(1, dtype=torch.int32)
    step = build_attention_metadata([1], [1], [[35]], PAGE_SIZE, group_page_tables=[[[4]]])
    executor.execute(ids, ids, step)
    beyond = build_attention_metadata([1], [1], [[35]], PAGE_SIZE, group_page_tables=[[[5]]])
    with pytest.raises(ValueError, match=r"group_paged_kv_indices\[0\]\[0\] is 5; a page of .* 0 to 4"):
        executor.execute(ids, ids, beyond)
    with pytest.raises(ValueError, match="group_slot_mapping is None"):
        executor.execute(ids, ids, build_attention_metadata([1], [1], [[35]], PAGE_SIZE))


@pytest.mark.parametrize("backend", ["off", "recorded"])
def test_a_step_without_the_tables_is_refused_without_validate(model: CausalLM, backend: str) -> None:
    executor, _ = make(model, [36, 5], kv_groups=True, validate=False, python_graph_backend=backend)
    ids = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="group_slot_mapping is None"):
        executor.execute(ids, ids, build_attention_metadata([1], [1], [[35]], PAGE_SIZE))
    step = build_attention_metadata([1], [1], [[35]], PAGE_SIZE, group_page_tables=[[[4]]])
    assert bool(executor.execute(ids, ids, step, ids).isfinite().all())
