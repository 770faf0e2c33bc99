"""Bad input end to end: one clear message and the right exit code, and other requests are not affected."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Events = list[dict[str, Any]]
Run = Callable[..., subprocess.CompletedProcess[str]]
Serve = Callable[..., Events]
Answers = Callable[[Events], dict[str, list[int]]]


def request(name: str, token_ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"id": name, "token_ids": token_ids, "max_tokens": max_tokens, **more}


def test_bad_requests_between_good_ones(llama: Path, serve: Serve, answers: Answers) -> None:
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


@pytest.mark.parametrize("flags", [[], ["--model_impl=native"]])
def test_hostile_lines_while_requests_run(llama: Path, serve: Serve, answers: Answers, flags: list[str]) -> None:
    good = [request(f"good {i}", [5 + i, 6, 7], 40, ignore_eos=True) for i in range(3)]
    expected = answers(serve(llama, good, *flags))
    hostile = [
        '{"id": ' + "[" * 50_000 + "]" * 50_000 + "}",
        '{"id": "bad", "max_tokens": 1, "token_ids": ' + "[" * 800 + "]" * 800 + "}",
        '{"command": ' + '{"a":' * 800,
        '{"id": "bad", "token_ids": [1], "max_tokens": 1}\0',
        "[" * 3_000_000,
        json.dumps(request("x" * 5000, [1], 1)),
    ]
    events = serve(llama, [*good[:2], *hostile, good[2]], *flags)
    assert answers(events) == expected
    assert [event["line"] for event in events if "error" in event] == [3, 4, 5, 6, 7, 8]


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
def fragile(make_fragile: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    """(checkpoint, plugin folder) of an out-of-tree model that raises at token 13 and gives NaN at token 17."""
    return make_fragile(PLUGIN)


def test_a_python_exception_fails_its_step_and_the_worker_goes_on(
    fragile: tuple[Path, Path], run: Run, answers: Answers
) -> None:
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


def test_output_of_python_stays_out_of_the_events(fragile: tuple[Path, Path], run: Run, answers: Answers) -> None:
    model, plugins = fragile
    code = (plugins / "fragile.py").read_text()
    (plugins / "fragile.py").write_text(code + 'print("hello from the model")\n')
    result = run(model, [request("r", [5], 1)], f"--python_model_path={plugins}")
    assert result.returncode == 0
    assert "hello from the model" in result.stderr
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


SICK = """
from xllm_models.layers import VocabParallelEmbedding
from xllm_models.models.llama import LlamaForCausalLM


class Sick(VocabParallelEmbedding):
    def forward(self, input_ids):
        return super().forward(input_ids).masked_fill((input_ids == 17)[:, None], float("nan"))


class FragileForCausalLM(LlamaForCausalLM):
    def build(self, config, tp):
        super().build(config, tp)
        self.model.embed_tokens.__class__ = Sick
"""


def test_nan_requests_do_not_harm_those_that_share_their_prefix(
    make_fragile: Callable[[str], tuple[Path, Path]], serve: Serve, answers: Answers
) -> None:
    """The hidden states of token 17 are NaN, and so are its keys and values in the cache that others hit."""
    model, plugins = make_fragile(SICK)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    clean = [request(f"clean {i}", [*prefix, 20 + i % 3, 30 + i], 5, ignore_eos=True) for i in range(24)]
    # Longer than a step, so that others hit the pages of its first chunk before it fails.
    sick = [request(f"sick {i}", [*prefix, 20 + i % 3, 17, *range(40 + i, 56 + i)], 5) for i in range(24)]
    flags = f"--python_model_path={plugins}", "--block_size=4", "--max_seqs_per_batch=8", "--max_tokens_per_batch=20"
    expected = answers(serve(model, clean, *flags))
    assert len(expected) == 24
    events = serve(model, [line for pair in zip(sick, clean, strict=True) for line in pair], *flags)
    failed = {event["id"] for event in events if "error" in event}
    assert failed == {line["id"] for line in sick}
    assert {name: tokens for name, tokens in answers(events).items() if name not in failed} == expected


DAMAGE = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "architecture": (
        lambda folder: edit_config(folder, architectures=["MambaForCausalLM"], model_type="mamba"),
        ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "truncated": (truncate, ["model.safetensors is truncated or not a safetensors file"]),
    "tensors": (
        drop_and_add_tensors,
        [
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.extra.weight",
            "lm_head.weight",
        ],
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ["has neither model.safetensors nor model.safetensors.index.json"],
    ),
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
        (["--max_model_len=1000"], 1, "max_model_len 1000 is outside 1 to 256, the model's positions"),
        (["--model_impl=native", "--max_model_len=1000"], 1, "max_model_len 1000 is outside 1 to 256"),
        (["--kv_cache_memory=100"], 1, "--kv_cache_memory is 100 bytes; one page of 16 tokens takes 12288"),
        (["--num_blocks=16777216", "--block_size=1024"], 1, "the limit is 2097151 pages of 1024 tokens"),
        (["--num_blocks=2000000", "--block_size=1024"], 1, "pages of 1024 tokens does not fit into memory: "),
        (["--python_model_path=/nowhere"], 1, "--python_model_path: /nowhere is not a directory"),
        (["--python_executable=/nowhere/python"], 1, "/nowhere/python does not run"),
        (["--python_graph_backend=magic"], 1, "python_graph_backend is 'magic'"),
        (["--block_size=sixteen"], 2, "--block_size=sixteen: expected an integer from 1 to 1024"),
        (["--model_impl=rust"], 2, "--model_impl=rust: expected python or native"),
    ],
)
def test_an_impossible_option_ends_with_one_error(
    llama: Path, run: Run, flags: list[str], exit_code: int, message: str
) -> None:
    result = run(llama, [], *flags)
    assert (result.returncode, result.stdout) == (exit_code, "")
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.startswith("error: ")


def test_a_context_beyond_what_rope_scaling_extends(copy_of_llama: Path, run: Run) -> None:
    path = copy_of_llama / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path.write_text(json.dumps(config))
    result = run(copy_of_llama, [], "--max_model_len=513")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: max_model_len 513 is outside 1 to 512, the model's positions (rope type 'dynamic', factor 2.0, "
        "max_position_embeddings 256)\n"
    )


def test_no_such_directory(run: Run) -> None:
    result = run("/nowhere")
    assert (result.returncode, result.stderr) == (1, "error: --model=/nowhere is not a directory\n")


def test_a_device_that_does_not_exist(llama: Path, worker_path: Path) -> None:
    command = [worker_path, f"--model={llama}", "--device=cuda:999"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    count = torch.cuda.device_count()
    assert result.stderr == f"error: device cuda:999 does not exist: torch finds {count} CUDA devices\n"
