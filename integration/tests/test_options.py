"""Options from command line and JSON file: values, precedence, and the message and exit code of each error."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunProbe = Callable[..., subprocess.CompletedProcess[str]]

REPO = Path(__file__).resolve().parents[2]
MODEL = "--model=m"


def parsed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    options: dict[str, Any] = json.loads(result.stdout)
    return options


def test_defaults(run_probe: RunProbe) -> None:
    options = parsed(run_probe("options", MODEL))
    assert options["model"] == "m"
    assert (options["block_size"], options["dtype"], options["num_blocks"]) == (16, "auto", -1)
    assert options["enable_prefix_cache"] is True


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--block_size=32"], "block_size", 32),
        (["--block_size", "32"], "block_size", 32),
        (["--enable_graph=false"], "enable_graph", False),
        (["--enable_prefix_cache=false"], "enable_prefix_cache", False),
        (["--kv_cache_memory=512MiB"], "kv_cache_memory", 512 << 20),
        (["--kv_cache_memory", "4096"], "kv_cache_memory", 4096),
        (["--python_model_path=/a:/b"], "python_model_path", "/a:/b"),
        (["--device=cuda:3"], "device_index", 3),
        (["--device_id=2"], "device_index", 2),
        (["--dtype=bfloat16"], "dtype", "bfloat16"),
    ],
)
def test_a_flag_sets_its_value(run_probe: RunProbe, args: list[str], name: str, value: object) -> None:
    assert parsed(run_probe("options", MODEL, *args))[name] == value


def test_command_line_over_file_over_default(run_probe: RunProbe, tmp_path: Path) -> None:
    config = tmp_path / "options.json"
    config.write_text(json.dumps({"model": "file", "block_size": 8, "dtype": "float16", "kv_cache_memory": "1MiB"}))
    options = parsed(run_probe("options", f"--config={config}", "--block_size=4"))
    assert (options["model"], options["block_size"], options["dtype"]) == ("file", 4, "float16")
    assert options["kv_cache_memory"] == 1 << 20
    assert options["max_seqs_per_batch"] == 64


def test_help_names_every_option_with_type_and_default(run_probe: RunProbe) -> None:
    result = run_probe("options", "--help")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    header = (REPO / "integration" / "worker" / "src" / "options.h").read_text()
    fields = header.partition("struct WorkerOptions {")[2].partition("};")[0]
    names = re.findall(r"(\w+)(?: = [^;]+)?;$", fields, re.MULTILINE)
    assert re.findall(r"^  --(\w+)  \(.+; default: .+\)\n      .+\.$", text, re.MULTILINE) == names
    for line in ("--model  (", "--block_size  (an integer from 1 to 1024; default: 16)", "--config  ("):
        assert line in text
    assert "--dtype  (auto, float32, bfloat16 or float16; default: auto)" in text


RANGE = "expected an integer from 1 to 1024"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--model is required: a checkpoint directory with config.json"),
        ([MODEL, "--blocksize=4"], "unknown flag --blocksize; --help lists all flags"),
        ([MODEL, "--block_size=four"], f"--block_size=four: {RANGE}"),
        ([MODEL, "--block_size=4.0"], f"--block_size=4.0: {RANGE}"),
        ([MODEL, "--block_size="], f"--block_size=: {RANGE}"),
        ([MODEL, "--block_size=0"], f"--block_size=0: {RANGE}"),
        ([MODEL, "--block_size=99999999999999999999"], f"--block_size=99999999999999999999: {RANGE}"),
        ([MODEL, "--block_size"], "--block_size needs a value: an integer from 1 to 1024"),
        ([MODEL, "--enable_graph=yes"], "--enable_graph=yes: expected true or false"),
        (
            [MODEL, "--enable_graph"],
            "--enable_graph=true needs --model_impl=native; with --model_impl=python use --python_graph_backend",
        ),
        ([MODEL, "--model_impl=rust"], "--model_impl=rust: expected python or native"),
        (
            [MODEL, "--model_impl=native", "--python_graph_backend=recorded"],
            "--python_graph_backend=recorded needs --model_impl=python; with --model_impl=native use --enable_graph",
        ),
        ([MODEL, "--tp_size=0"], "--tp_size=0: expected an integer from 1 to 1024"),
        ([MODEL, "--kv_cache_dtype=fp8_e5m2"], "--kv_cache_dtype=fp8_e5m2: expected auto or fp8_e4m3"),
        (
            [MODEL, "--model_impl=native", "--kv_cache_dtype=fp8_e4m3"],
            "--kv_cache_dtype=fp8_e4m3 needs --model_impl=python",
        ),
        (
            [MODEL, "--dtype=fp8"],
            "--dtype=fp8: expected auto, float32, bfloat16 or float16",
        ),
        (
            [MODEL, "--kv_cache_memory=1GB"],
            "--kv_cache_memory=1GB: expected a size such as 1073741824, 512MiB or 4GiB",
        ),
        ([MODEL, "--device=gpu"], "--device=gpu: expected auto, cpu, cuda or cuda:N"),
        ([MODEL, "--device=cuda:x"], "--device=cuda:x: expected auto, cpu, cuda or cuda:N"),
        (
            [MODEL, "--device=cuda:1", "--device_id=0"],
            "--device=cuda:1 and --device_id=0 name different devices",
        ),
        (
            [MODEL, "--device=cpu", "--device_id=0"],
            "--device_id is the index of a CUDA device; it contradicts --device=cpu",
        ),
        (
            [MODEL, "--num_blocks=4", "--kv_cache_memory=1GiB"],
            "--num_blocks and --kv_cache_memory both size the KV cache; give one",
        ),
        (
            [MODEL, "--max_tokens_per_batch=4"],
            "--max_tokens_per_batch is 4; it must be at least --max_seqs_per_batch, 64, "
            "so that every running sequence gets its token in each step",
        ),
        ([MODEL, MODEL], "--model is given twice"),
        (["m"], "unexpected argument 'm'; a value follows its flag, as in --block_size=16"),
        ([MODEL, "--config=nowhere.json"], "--config=nowhere.json: the file cannot be read"),
    ],
)
def test_a_wrong_command_line_ends_with_2(run_probe: RunProbe, args: list[str], message: str) -> None:
    result = run_probe("options", *args)
    assert (result.returncode, result.stderr, result.stdout) == (2, f"error: {message}\n", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"blocksize": 4}', 'unknown option "blocksize"'),
        ('{"block_size": "4"}', f'block_size is "4": {RANGE}'),
        ('{"block_size": 4.0}', f"block_size is 4.0: {RANGE}"),
        ('{"block_size": true}', f"block_size is true: {RANGE}"),
        ('{"block_size": 18446744073709551615}', f"block_size is 18446744073709551615: {RANGE}"),
        ('{"block_size": 4096}', f"block_size is 4096: {RANGE}"),
        ('{"enable_graph": 0}', "enable_graph is 0: expected true or false"),
        ('{"model": 7}', "model is 7: expected a string"),
        ('{"model": null}', "model is null: expected a string"),
        ('{"dtype": "fp8"}', 'dtype is "fp8": expected auto, float32, bfloat16 or float16'),
        (
            '{"kv_cache_memory": "1GB"}',
            'kv_cache_memory is "1GB": expected a size such as 1073741824, 512MiB or 4GiB',
        ),
        ('{"config": "x"}', "config is allowed on the command line only"),
        ('{"block_size": 4, "block_size": 8}', 'key "block_size" appears twice'),
        ("[]", "expected an object of options, found an array"),
    ],
)
def test_a_wrong_file_ends_with_2(run_probe: RunProbe, tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "options.json"
    config.write_text(text)
    # The value is checked even though the command line overrides it.
    result = run_probe("options", MODEL, f"--config={config}", "--block_size=2")
    assert (result.returncode, result.stderr) == (2, f"error: {config}: {message}\n")


def test_a_file_that_is_not_json(run_probe: RunProbe, tmp_path: Path) -> None:
    config = tmp_path / "options.json"
    config.write_text('{"block_size": 4,}')
    result = run_probe("options", MODEL, f"--config={config}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {config}: parse error at line 1, column 18")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"block_size": ' + "[" * 100_000, "it is nested more than 16 levels deep"),
        ('{"a":' * 100_000, "it is nested more than 16 levels deep"),
        ('{"block_size": 4}\0', "it has a NUL byte at offset 17"),
        (json.dumps({"k" * 10_000: 1}), f'unknown option "{"k" * 79}...'),
        (" " * (1 << 20) + "{}", "the file has more than 1048576 bytes, the limit for options"),
        (None, "the file has more than 1048576 bytes, the limit for options"),
    ],
)
def test_a_hostile_config_file(run_probe: RunProbe, tmp_path: Path, text: str | None, message: str) -> None:
    config = Path("/dev/zero")
    if text is not None:
        config = tmp_path / "options.json"
        config.write_text(text)
    result = run_probe("options", MODEL, f"--config={config}")
    assert (result.returncode, result.stderr) == (2, f"error: {config}: {message}\n")


RANK_CONFIG = ("rank", "ranks", "local_rank", "store_address", "spawns_ranks", "uses_agent_store")
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "far", "MASTER_PORT": "29501"}
BY_HAND = ["--tp_size=4", "--tp_rank=2", "--tp_port=5000", "--tp_host=near"]


@pytest.mark.parametrize(
    ("args", "environment", "rank_config"),
    [
        ([], {}, (0, 1, 0, "127.0.0.1:0", False, False)),
        (["--tp_size=2"], {}, (0, 2, 0, "127.0.0.1:0", True, False)),
        (BY_HAND, {}, (2, 4, 2, "near:5000", False, False)),
        ([], TORCHRUN, (5, 8, 1, "far:29501", False, False)),
        (["--tp_host=far", "--tp_port=29501"], TORCHRUN, (5, 8, 1, "far:29501", False, False)),
        (["--tp_size=8"], TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, (5, 8, 1, "far:29501", False, True)),
        (["--tp_size=2"], {"RANK": "5", "WORLD_SIZE": "8"}, (0, 2, 0, "127.0.0.1:0", True, False)),
    ],
)
def test_the_rank_comes_from_flags_or_the_environment(
    run_probe: RunProbe,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    environment: dict[str, str],
    rank_config: tuple[object, ...],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = parsed(run_probe("options", MODEL, *args))
    assert tuple(options[name] for name in RANK_CONFIG) == rank_config


@pytest.mark.parametrize(
    ("args", "environment", "message"),
    [
        (["--tp_size=2", "--tp_rank=1"], {}, "--tp_rank needs --tp_port, the port of rank 0's store"),
        ([*BY_HAND[2:], "--tp_size=2", "--tp_rank=2"], {}, "rank 2 is out of range for 2 ranks"),
        (["--tp_size=4"], TORCHRUN, "--tp_size=4 contradicts WORLD_SIZE=8 in the environment"),
        (["--tp_rank=4", "--tp_size=8"], TORCHRUN, "--tp_rank=4 contradicts RANK=5 in the environment"),
        (["--tp_port=4"], TORCHRUN, "--tp_port=4 contradicts MASTER_PORT=29501 in the environment"),
        (["--tp_host=near"], TORCHRUN, "--tp_host=near contradicts MASTER_ADDR=far in the environment"),
        (["--tp_host=127.0.0.1"], TORCHRUN, "--tp_host=127.0.0.1 contradicts MASTER_ADDR=far in the environment"),
        ([], TORCHRUN | {"RANK": "x"}, "RANK=x in the environment: expected a number of at least 0"),
    ],
)
def test_a_contradictory_rank_ends_with_2(
    run_probe: RunProbe,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run_probe("options", MODEL, *args)
    assert (result.returncode, result.stderr) == (2, f"error: {message}\n")
