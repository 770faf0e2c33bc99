"""The worker end to end: tokens equal to HF transformers', bad input, failing steps, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

Events = list[dict[str, Any]]
Run = Callable[..., subprocess.CompletedProcess[str]]
Serve = Callable[..., Events]

REPO = Path(__file__).parents[2]
FRONT = REPO / "integration" / "python"
EOS = 2
# One thread: libgomp's spinning threads lose to anything else that runs on the machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, saved by transformers."""
    torch.manual_seed(7)
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=24, tie_word_embeddings=True))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small random model."""
    torch.manual_seed(8)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of_llama(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def run(worker_path: Path) -> Run:
    """`run(model, lines, *flags)`: one run of the worker to its end, with everything it printed."""

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
def serve(run: Run) -> Serve:
    """As `run`, for a run that ends well; returns the events."""

    def serve_lines(model: Path, lines: Iterable[str | dict[str, Any]], *flags: str) -> Events:
        result = run(model, lines, *flags)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return serve_lines


def request(name: str, token_ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "token_ids": token_ids, "max_tokens": max_tokens, **more}


def answers(events: Events) -> dict[str, list[int]]:
    """{id: tokens}, of the requests that finished; each count is checked."""
    tokens: dict[str, list[int]] = {}
    for event in events:
        if "token_ids" in event:
            tokens.setdefault(event["id"], []).extend(event["token_ids"])
    finished = {event["id"]: event for event in events if event.get("finished")}
    for name, event in finished.items():
        assert event["completion_tokens"] == len(tokens[name])
    return {name: tokens[name] for name in finished}


def hf_greedy(model: Any, prompt: list[int], num_tokens: int, eos: int | None = None) -> list[int]:
    """Greedy tokens by transformers, which stops after `eos`."""
    model.generation_config.eos_token_id = eos
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def load_hf(folder: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


PROMPTS = [[5], [7, 8, 9], list(range(10, 27)), list(range(30, 80)), [3] * 100]

SETTINGS = {
    "one by one": ["--max_seqs_per_batch=1"],
    "one batch": [],
    "pages of one token": ["--block_size=1", "--num_blocks=800"],
    "chunks beside decodes": ["--max_seqs_per_batch=5", "--max_tokens_per_batch=16"],
    "a cache too small for all": ["--block_size=4", "--num_blocks=40"],
}


@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_tokens_equal_transformers(checkpoint: Path, serve: Serve, flags: list[str]) -> None:
    model = load_hf(checkpoint)
    requests = [request(f"r{i}", prompt, 40) for i, prompt in enumerate(PROMPTS)]
    events = serve(checkpoint, [*requests, {"command": "stats"}], "--dtype=float32", *flags)
    got = answers(events)
    for i, prompt in enumerate(PROMPTS):
        assert got[f"r{i}"] == hf_greedy(model, prompt, 40, EOS)


def test_one_execute_a_step_and_one_plan_a_step(llama: Path, worker_path: Path) -> None:
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


def test_ready_tells_what_is_served(llama: Path, serve: Serve) -> None:
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


def test_the_cache_is_no_larger_than_its_sequences_need(llama: Path, serve: Serve) -> None:
    (ready,) = serve(llama, [], "--max_seqs_per_batch=3", "--max_model_len=100", "--block_size=16")
    assert ready["num_blocks"] == 3 * 7


def test_eos_stop_tokens_and_ignore_eos(llama: Path, serve: Serve) -> None:
    free = answers(serve(llama, [request("r", [5, 6], 30, ignore_eos=True)]))["r"]
    assert len(free) == 30
    stop = free[10]
    first = free.index(stop) + 1
    events = serve(llama, [request("r", [5, 6], 30, ignore_eos=True, stop_token_ids=[stop])])
    assert answers(events)["r"] == free[:first]
    assert events[-1]["finish_reason"] == "stop"


def test_eos_of_the_config_ends_an_answer(copy_of_llama: Path, serve: Serve) -> None:
    free = answers(serve(copy_of_llama, [request("r", [5, 6], 30, ignore_eos=True)]))["r"]
    config = json.loads((copy_of_llama / "config.json").read_text())
    config["eos_token_id"] = [free[3], 255]
    (copy_of_llama / "config.json").write_text(json.dumps(config))
    events = serve(copy_of_llama, [request("r", [5, 6], 30), request("on", [5, 6], 30, ignore_eos=True)])
    assert answers(events) == {"r": free[: free.index(free[3]) + 1], "on": free}


def test_bad_requests_beside_good_ones(llama: Path, serve: Serve) -> None:
    good = request("good", [5, 6, 7], 20)
    expected = answers(serve(llama, [good]))["good"]
    lines = [
        good,
        "not json",
        request("outside", [5, 256], 4),
        request("empty", [], 4),
        request("long", [5] * 256, 4),
        request("huge", [5] * 160, 4),
        {"id": "half"},
        {**good, "id": "last"},
    ]
    events = serve(llama, lines, "--num_blocks=8", "--block_size=16")
    assert answers(events) == {"good": expected, "last": expected}
    errors = {event["line"]: event for event in events if "error" in event}
    assert list(errors) == [2, 3, 4, 5, 6, 7]
    assert {event["error"]["type"] for event in errors.values()} == {"invalid_request"}
    messages = {event["id"]: event["error"]["message"] for event in errors.values()}
    assert "token_ids[1] is 256; expected token ids from 0 to 255" in messages["outside"]
    assert "token_ids has 256 tokens; the limit is 255" in messages["long"]
    assert "token_ids has 160 tokens; the limit is 128, the size of the whole KV cache" in messages["huge"]


PLUGIN = """
from xllm_models.models.llama import LlamaForCausalLM


class FragileForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids, positions):
        if (input_ids == 13).any():
            raise ArithmeticError("13 is not a lucky token")
        hidden = super().forward(input_ids, positions)
        return hidden.masked_fill((input_ids == 17)[:, None], float("nan"))
"""


@pytest.fixture
def fragile(copy_of_llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(checkpoint, plugin folder): a model outside the packages that throws at token 13 and gives NaN at token 17."""
    plugins = tmp_path / "plugins"
    info = plugins / "fragile-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[xllm.models]\nFragileForCausalLM = fragile:FragileForCausalLM\n")
    (plugins / "fragile.py").write_text(PLUGIN)
    config = json.loads((copy_of_llama / "config.json").read_text())
    config["architectures"] = ["FragileForCausalLM"]
    (copy_of_llama / "config.json").write_text(json.dumps(config))
    return copy_of_llama, plugins


def test_a_python_exception_fails_its_step_and_the_worker_goes_on(fragile: tuple[Path, Path], run: Run) -> None:
    model, plugins = fragile
    lines = [request("bad", [5, 13], 4), request("good", [5, 6], 4, ignore_eos=True), request("nan", [17], 4)]
    result = run(model, lines, f"--python_model_path={plugins}", "--max_seqs_per_batch=1")
    assert result.returncode == 0
    events = [json.loads(line) for line in result.stdout.splitlines()]
    errors = {event["id"]: event for event in events if "error" in event}
    assert errors["bad"]["line"] == 1
    assert errors["bad"]["error"] == {
        "type": "internal",
        "message": "ArithmeticError: 13 is not a lucky token",
    }
    assert errors["nan"]["error"]["message"] == "the logits of token 1 are not numbers (NaN)"
    assert len(answers(events)["good"]) == 4
    assert "fragile.py" in result.stderr  # the traceback


def test_what_python_prints_stays_out_of_the_events(fragile: tuple[Path, Path], run: Run) -> None:
    model, plugins = fragile
    code = (plugins / "fragile.py").read_text()
    (plugins / "fragile.py").write_text(code + 'print("hello from the model")\n')
    result = run(model, [request("r", [5], 1)], f"--python_model_path={plugins}")
    assert "hello" not in result.stdout
    assert answers([json.loads(line) for line in result.stdout.splitlines()]).keys() == {"r"}


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def drop_and_add_tensors(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.extra.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.zeros(5, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGE = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "architecture": (
        lambda folder: edit_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"),
        ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "truncated": (truncate, ["model.safetensors"]),
    "tensors": (
        drop_and_add_tensors,
        [
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.extra.weight",
            "lm_head.weight",
        ],
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["safetensors"]),
}


@pytest.mark.parametrize(("damage", "parts"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_ends_with_1(
    copy_of_llama: Path, run: Run, damage: Callable[[Path], None], parts: list[str]
) -> None:
    damage(copy_of_llama)
    result = run(copy_of_llama)
    assert (result.returncode, result.stdout) == (1, "")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for part in parts:
        assert part in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        (["--max_model_len=1000"], 1, "the limit is the model's max_position_embeddings, 256"),
        (["--kv_cache_memory=100"], 1, "--kv_cache_memory is 100 bytes; one page of 16 tokens takes 12288"),
        (["--num_blocks=16777216", "--block_size=1024"], 1, "the limit is 2097151 pages of 1024 tokens"),
        (["--num_blocks=2000000", "--block_size=1024"], 1, "pages of 1024 tokens does not fit into memory: "),
        (["--python_model_path=/nowhere"], 1, "--python_model_path: /nowhere is not a directory"),
        (["--python_executable=/nowhere/python"], 1, "/nowhere/python does not run"),
        (["--python_graph_backend=magic"], 1, "python_graph_backend is 'magic'"),
        (["--block_size=sixteen"], 2, "--block_size=sixteen: expected an integer from 1 to 1024"),
        (["--model_impl=native"], 2, "--model_impl=native: expected python"),
    ],
)
def test_what_cannot_be_served_ends_with_one_error(
    llama: Path, run: Run, flags: list[str], exit_code: int, message: str
) -> None:
    result = run(llama, [], *flags)
    assert (result.returncode, result.stdout) == (exit_code, "")
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.startswith("error: ")


def test_no_such_directory(run: Run) -> None:
    result = run("/nowhere")
    assert (result.returncode, result.stderr) == (1, "error: --model=/nowhere is not a directory\n")


@pytest.mark.skipif(torch.cuda.device_count() > 64, reason="the machine has that many devices")
def test_a_device_that_is_not_there(llama: Path, worker_path: Path) -> None:
    command = [worker_path, f"--model={llama}", "--device=cuda:64"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    count = torch.cuda.device_count()
    assert result.stderr == f"error: device cuda:64 is not there: torch sees {count} CUDA devices\n"


# A real model.

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village at the edge of a forest, there lived",
    "def fibonacci(n):\n",
    "Water",
    "List three reasons why people keep diaries, and say for each of them what it means for those who read the diary "
    "many years later, when its writer and all the people it speaks of are gone:\n\n1.",
]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real checkpoint, as the fetch command makes it."""
    env = {**os.environ, "PYTHONPATH": str(FRONT)}
    command = [sys.executable, "-m", "xllm_text", "fetch"]
    result = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True)
    return Path(result.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_answers(smollm2: Path) -> list[tuple[list[int], list[int]]]:
    """[(prompt ids, 64 greedy tokens of transformers in fp32)]"""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    model = load_hf(smollm2)
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    return [(prompt, hf_greedy(model, prompt, 64)) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--max_seqs_per_batch=1"], []], ids=["one by one", "one batch"])
def test_smollm2_tokens_equal_transformers(
    smollm2: Path, smollm2_answers: list[tuple[list[int], list[int]]], serve: Serve, flags: list[str]
) -> None:
    requests = [request(str(i), prompt, 64, ignore_eos=True) for i, (prompt, _) in enumerate(smollm2_answers)]
    got = answers(serve(smollm2, requests, "--dtype=float32", "--max_model_len=512", *flags))
    assert [got[str(i)] for i in range(len(TEXTS))] == [expected for _, expected in smollm2_answers]


@pytest.mark.slow
def test_the_text_front_answers(smollm2: Path, worker_path: Path) -> None:
    command = [sys.executable, "-m", "xllm_text", "--worker", worker_path, "--model", smollm2]
    result = subprocess.run(
        [*command, "--max-tokens", "8", TEXTS[0]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": str(FRONT)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert "8 tokens, the first after" in result.stderr
