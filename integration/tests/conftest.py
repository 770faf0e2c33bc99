"""Fixtures for the worker's tests: the probe programs, small checkpoints, and functions that run the worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent / "support"))

# One OpenMP thread: libgomp's spinning threads are very slow on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TENSOR_MODES = ("batch", "sample", "in_flight", "token_ids")

Json = Any
Ask = Callable[[str, Json], Json]
Run = Callable[..., subprocess.CompletedProcess[str]]
Events = list[dict[str, Any]]


@pytest.fixture(scope="session")
def probe_path(worker_path: Path) -> Path:
    """The test program that drives the worker's core without a model."""
    return worker_path.with_name("xllm_core_probe")


@pytest.fixture(scope="session")
def ask(probe_path: Path) -> Iterator[Ask]:
    """`ask(mode, value)`: the probe's JSON answer. One process per mode, kept for the session."""
    processes: dict[str, subprocess.Popen[str]] = {}

    def ask_mode(mode: str, value: Json) -> Json:
        if mode not in processes:
            program = probe_path.with_name("xllm_tensor_probe") if mode in TENSOR_MODES else probe_path
            processes[mode] = subprocess.Popen(
                [str(program), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = processes[mode]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask_mode
    for process in processes.values():
        process.communicate()
        assert process.returncode == 0


@pytest.fixture(scope="session")
def run_probe(probe_path: Path) -> Run:
    """`run_probe(mode, *args, stdin="")`: runs the probe until it exits."""

    def run(mode: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [str(probe_path), mode, *args]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def small_config() -> dict[str, Any]:
    """The config keys of a small model."""
    return {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@pytest.fixture(scope="session")
def llama(small_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small random model."""
    torch.manual_seed(8)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**small_config)).save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of_llama(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may modify."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def run(worker_path: Path) -> Run:
    """`run(model, lines, *flags)`: runs the worker until it exits and returns its output."""

    def run_worker(
        model: Path | str, lines: Iterable[str | dict[str, Any]] = (), *flags: str
    ) -> subprocess.CompletedProcess[str]:
        text = "".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        command = [worker_path, f"--model={model}", "--device=cpu", *flags]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT
        )

    return run_worker


@pytest.fixture
def serve(run: Run) -> Callable[..., Events]:
    """As `run`, but checks for exit code 0 and returns the events."""

    def serve_lines(model: Path, lines: Iterable[str | dict[str, Any]], *flags: str) -> Events:
        result = run(model, lines, *flags)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return serve_lines


@pytest.fixture(scope="session")
def answers() -> Callable[[Events], dict[str, list[int]]]:
    """`answers(events)`: {id: tokens} of the requests that finished; each count is checked."""

    def collect(events: Events) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for event in events:
            if "token_ids" in event:
                tokens.setdefault(event["id"], []).extend(event["token_ids"])
        finished = {event["id"]: event for event in events if event.get("finished")}
        for name, event in finished.items():
            assert event["completion_tokens"] == len(tokens[name])
        return {name: tokens[name] for name in finished}

    return collect


@pytest.fixture(scope="session")
def hf_greedy() -> Callable[[Path, list[list[int]], int, int | None], list[list[int]]]:
    """`hf_greedy(folder, prompts, num_tokens, eos)`: greedy tokens of transformers in fp32, up to `eos`."""

    def generate(folder: Path, prompts: list[list[int]], num_tokens: int, eos: int | None) -> list[list[int]]:
        torch.set_num_threads(1)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = eos
        outputs = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            outputs.append(output[0, len(prompt) :].tolist())
        return outputs

    return generate


@pytest.fixture
def make_fragile(copy_of_llama: Path, tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """`make_fragile(code)`: (checkpoint, plugin folder) of an out-of-tree model, FragileForCausalLM in `code`."""

    def make(code: str) -> tuple[Path, Path]:
        plugins = tmp_path / "plugins"
        info = plugins / "fragile-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[xllm.models]\nFragileForCausalLM = fragile:FragileForCausalLM\n")
        (plugins / "fragile.py").write_text(code)
        config = json.loads((copy_of_llama / "config.json").read_text())
        config["architectures"] = ["FragileForCausalLM"]
        (copy_of_llama / "config.json").write_text(json.dumps(config))
        return copy_of_llama, plugins

    return make
