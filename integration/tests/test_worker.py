"""The worker end to end on small random models: tokens equal transformers', the ready event, and ends of answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Events = list[dict[str, Any]]
Serve = Callable[..., Events]
Answers = Callable[[Events], dict[str, list[int]]]
HfGreedy = Callable[[Path, list[list[int]], int, int | None], list[list[int]]]

EOS = 2


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def checkpoint(
    request: pytest.FixtureRequest, small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small random model, saved by transformers."""
    torch.manual_seed(7)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**small_config))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**small_config, head_dim=24, tie_word_embeddings=True))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


def request(name: str, token_ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "token_ids": token_ids, "max_tokens": max_tokens, **more}


PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 80)), [3] * 100]


@pytest.fixture(scope="session")
def expected(checkpoint: Path, hf_greedy: HfGreedy) -> list[list[int]]:
    return hf_greedy(checkpoint, PROMPTS, 40, EOS)


SETTINGS = {
    "one by one": ["--max_seqs_per_batch=1"],
    "one batch": [],
    "pages of one token": ["--block_size=1", "--num_blocks=800"],
    "chunks together with decodes": ["--max_seqs_per_batch=5", "--max_tokens_per_batch=16"],
    "a cache too small for all": ["--block_size=4", "--num_blocks=40"],
}


@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_tokens_equal_transformers(
    checkpoint: Path, expected: list[list[int]], worker_path: Path, answers: Answers, flags: list[str]
) -> None:
    from xllm_text.worker import Worker

    events: Events = []
    with Worker([str(worker_path), f"--model={checkpoint}", "--device=cpu", "--dtype=float32", *flags]) as worker:
        worker.ready()
        worker.send({"command": "pause"})
        for i, prompt in enumerate(PROMPTS):
            worker.send(request(f"r{i}", prompt, 40))
        worker.send({"command": "resume"})
        while sum(event.get("finished", False) for event in events) < len(PROMPTS):
            events.append(worker.read_event())
            assert "error" not in events[-1]
        worker.send({"command": "stats"})
        stats = worker.read_event()["scheduler"]
        assert worker.close() == 0
    got = answers(events)
    assert [got[f"r{i}"] for i in range(len(PROMPTS))] == expected
    # Each setting does what its name says: the number of steps, and preemptions.
    num_steps = sum(map(len, expected)) if flags == SETTINGS["one by one"] else max(map(len, expected))
    assert stats["num_steps"] >= num_steps
    assert (stats["num_preemptions"] > 0) == (flags == SETTINGS["a cache too small for all"])


@pytest.fixture(scope="session")
def longrope(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Phi-3: short rotary factors up to 64 positions, long ones up to 256."""
    torch.manual_seed(9)
    num_frequencies = small_config["hidden_size"] // small_config["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(num_frequencies)],
        "long_factor": [4.0 + i for i in range(num_frequencies)],
    }
    # Large weights, so that the tokens depend on attention and on the rotary factors.
    own = {"pad_token_id": 0, "original_max_position_embeddings": 64, "initializer_range": 0.1}
    config = Phi3Config(**small_config, **own, rope_parameters=rope)
    folder = tmp_path_factory.mktemp("phi3")
    Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_served_length_chooses_longropes_factors(
    longrope: Path, hf_greedy: HfGreedy, serve: Serve, answers: Answers
) -> None:
    """transformers chooses the factors by the length of each sequence: short up to 64 positions, long above."""
    short, long = list(range(3, 23)), list(range(3, 103))
    expected = [hf_greedy(longrope, [prompt], 40, None)[0] for prompt in (short, long)]
    by_default = answers(
        serve(longrope, [request(f"{n}", p, 40, ignore_eos=True) for n, p in enumerate((short, long))])
    )
    limited = answers(serve(longrope, [request("0", short, 40, ignore_eos=True)], "--max_model_len=64"))
    assert limited["0"] == expected[0]
    assert by_default["1"] == expected[1]
    assert by_default["0"] != expected[0]


@pytest.mark.parametrize("model_impl", ["python", "native"])
@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_scaled_rope_serves_contexts_beyond_max_position_embeddings(
    rope_type: str,
    model_impl: str,
    small_config: dict[str, Any],
    tmp_path: Path,
    hf_greedy: HfGreedy,
    serve: Serve,
    answers: Answers,
) -> None:
    torch.manual_seed(10)
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(**small_config, initializer_range=0.1, rope_parameters=rope)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    prompt = [3 + 7 * i % 250 for i in range(240)]
    flags = [f"--model_impl={model_impl}", "--dtype=float32", "--max_model_len=300"]
    got = answers(serve(tmp_path, [request("0", prompt, 40, ignore_eos=True)], *flags))
    assert got["0"] == hf_greedy(tmp_path, [prompt], 40, None)[0]


def test_one_execute_and_one_plan_per_step(llama: Path, worker_path: Path) -> None:
    from xllm_text.worker import Worker

    with Worker([str(worker_path), f"--model={llama}", "--device=cpu"]) as worker:
        worker.ready()
        worker.send(request("r", [5, 6, 7], 9, ignore_eos=True))
        while not worker.read_event().get("finished"):
            pass
        worker.send({"command": "stats"})
        stats = worker.read_event()
        assert worker.close() == 0
    num_steps = stats["scheduler"]["num_steps"]
    assert num_steps == 9
    assert sum(stats["executor"]["steps"].values()) == num_steps
    assert stats["executor"]["plans"] == [num_steps]


def test_the_ready_event(llama: Path, serve: Serve) -> None:
    flags = ["--dtype=bfloat16", "--block_size=8", "--kv_cache_memory=64KiB", "--max_model_len=100"]
    # A token takes 3 layers x 2 (k, v) x 2 heads x 16 x 2 bytes = 384 bytes, a page 3,072.
    assert serve(llama, [], *flags) == [
        {
            "event": "ready",
            "model_type": "llama",
            "vocab_size": 256,
            "max_model_len": 100,
            "num_blocks": 21,
            "block_size": 8,
            "dtype": "bfloat16",
            "device": "cpu",
            "eos_token_ids": [EOS],
        }
    ]


def test_an_fp8_cache_has_twice_the_pages(llama: Path, serve: Serve) -> None:
    flags = ["--dtype=bfloat16", "--block_size=8", "--kv_cache_memory=64KiB", "--max_model_len=100"]
    (ready,) = serve(llama, [], *flags, "--kv_cache_dtype=fp8_e4m3")
    assert (ready["num_blocks"], ready["dtype"]) == (42, "bfloat16")  # a page takes 1,536 bytes


def test_answers_from_an_fp8_cache_do_not_depend_on_chunks_and_preemption(
    llama: Path, serve: Serve, answers: Answers
) -> None:
    requests = [request(f"r{i}", list(range(3 + i, 20 + 2 * i)), 12, ignore_eos=True) for i in range(6)]
    flags = ["--kv_cache_dtype=fp8_e4m3", "--block_size=4"]
    alone: dict[str, list[int]] = {}
    for one in requests:
        alone |= answers(serve(llama, [one], *flags))
    small = ["--num_blocks=24", "--max_seqs_per_batch=4", "--max_tokens_per_batch=8"]
    assert answers(serve(llama, requests, *flags, *small)) == alone
    graphs = [*small, "--python_graph_backend=recorded"]
    assert answers(serve(llama, requests, *flags, *graphs)) == alone


def test_the_cache_is_no_larger_than_its_sequences_need(llama: Path, serve: Serve) -> None:
    (ready,) = serve(llama, [], "--max_seqs_per_batch=3", "--max_model_len=100", "--block_size=16")
    assert ready["num_blocks"] == 3 * 7


def test_eos_stop_tokens_and_ignore_eos(llama: Path, serve: Serve, answers: Answers) -> None:
    free = answers(serve(llama, [request("r", [5, 6], 30, ignore_eos=True)]))["r"]
    assert len(free) == 30
    stop = free[10]
    first = free.index(stop) + 1
    events = serve(llama, [request("r", [5, 6], 30, ignore_eos=True, stop_token_ids=[stop])])
    assert answers(events)["r"] == free[:first]
    assert events[-1]["finish_reason"] == "stop"


def test_eos_of_the_config_ends_an_answer(copy_of_llama: Path, serve: Serve, answers: Answers) -> None:
    free = answers(serve(copy_of_llama, [request("r", [5, 6], 30, ignore_eos=True)]))["r"]
    config = json.loads((copy_of_llama / "config.json").read_text())
    config["eos_token_id"] = [free[3], 255]
    (copy_of_llama / "config.json").write_text(json.dumps(config))
    events = serve(copy_of_llama, [request("r", [5, 6], 30), request("on", [5, 6], 30, ignore_eos=True)])
    assert answers(events) == {"r": free[: free.index(free[3]) + 1], "on": free}
