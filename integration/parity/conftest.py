"""Fixtures for the parity tests: small checkpoints with every feature of their family, and a fixed workload.

Each worker runs the workload once. The tests compare its whole output: tokens, a digest of each row of logits, the
largest logits, and the runner of each step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

NUM_PROMPTS, NUM_TOKENS = 8, 64


Events = list[dict[str, Any]]
RunWorkload = Callable[..., "Transcript"]

REPORT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[REPORT]:
        terminalreporter.section("tensor parallelism")
        for line in config.stash[REPORT]:
            terminalreporter.write_line(line)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`report(line)`: prints a line at the end of the pytest run."""
    lines = request.config.stash[REPORT]
    return lines.append


@pytest.fixture(scope="session", autouse=True)
def _quiet_threads() -> None:
    """Avoids OpenMP threads that spin: several processes share few cores."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The output of one worker run."""

    ready: dict[str, Any]
    events: Events  # tokens and ends, in order
    stats: dict[str, Any]

    def tokens(self) -> dict[str, list[int]]:
        """The answer of each request."""
        answers: dict[str, list[int]] = {}
        for event in self.events:
            answers.setdefault(event["id"], []).extend(event.get("token_ids", []))
        return answers

    def tops(self) -> dict[str, list[list[list[float]]]]:
        """The largest logits for each token of each answer: [[id, value], ...]."""
        tops: dict[str, list[list[list[float]]]] = {}
        for event in self.events:
            if "logits" in event:
                tops.setdefault(event["id"], []).append(event["logits"]["top"])
        return tops


def request(name: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    return {"id": name, "token_ids": token_ids, "max_tokens": max_tokens, "ignore_eos": True, "show_logits": True}


@pytest.fixture(scope="session")
def workload() -> list[list[dict[str, Any]]]:
    """Two batches: prompts that decode together; and a mix in which prompts enter in chunks while others decode."""
    generator = torch.Generator().manual_seed(3)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 250, (length,), generator=generator).tolist()

    lengths = [1, 2, 7, 8, 9, 20, 31, 50]
    together = [request(f"p{i}", prompt(lengths[i]), NUM_TOKENS) for i in range(NUM_PROMPTS)]
    mixed = [request(f"m{i}", prompt(1 + (37 * i) % 101), 2 + (11 * i) % 29) for i in range(20)]
    return [together, mixed]


@pytest.fixture(scope="session")
def run_workload(worker_path: Path, workload: list[list[dict[str, Any]]], _quiet_threads: None) -> RunWorkload:
    """`run_workload(model, *flags, batches=workload)`: the output of a worker run, cached by arguments."""
    from xllm_text.worker import Worker

    made: dict[tuple[Any, ...], Transcript] = {}

    def run(model: Path, *flags: str, batches: list[list[dict[str, Any]]] = workload) -> Transcript:
        key = (model, flags, id(batches))
        if key not in made:
            with Worker([str(worker_path), f"--model={model}", "--device=cpu", "--tp_timeout=60", *flags]) as worker:
                ready = worker.ready()
                events = [event for batch in batches for event in _answer(worker, batch)]
                worker.send({"command": "stats"})
                stats = worker.read_event()
                assert worker.close() == 0
            for step in stats["scheduler"]["steps"].values():
                assert step.pop("seconds") >= 0  # times differ from run to run
            made[key] = Transcript(ready=ready, events=events, stats=stats)
        return made[key]

    return run


def _answer(worker: Any, batch: list[dict[str, Any]]) -> Events:
    """Sends the batch while paused, so that all requests arrive in one step, and returns its events."""
    worker.send({"command": "pause"})
    for message in batch:
        worker.send(message)
    worker.send({"command": "resume"})
    events: Events = []
    while sum(bool(event.get("finished")) for event in events) < len(batch):
        events.append(worker.read_event())
        assert "error" not in events[-1], events[-1]
        events[-1].pop("timing", None)
    return events


def _saved(model: PreTrainedModel, folder: Path) -> Path:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        # Scaled for logits of a few units, as in a trained model.
        parameter.data = 1 + 0.2 * values if "norm" in name else 0.15 * values
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with biases and llama3 rope scaling; Qwen3 with tied embeddings and sliding windows in all layers but one.

    Both have an odd vocabulary and a head_dim that differs from hidden_size / heads.
    """
    config: dict[str, Any] = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        config |= {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope}
        return _saved(LlamaForCausalLM(LlamaConfig(**config)), folder)
    config |= {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return _saved(Qwen3ForCausalLM(Qwen3Config(**config)), folder)


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model for up to eight ranks: 8 heads and 2 kv heads."""
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
    )
    return _saved(LlamaForCausalLM(config), tmp_path_factory.mktemp("wide"))
