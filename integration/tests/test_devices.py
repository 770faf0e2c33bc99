"""The worker on the CPU and, in GPU runs, on CUDA devices, with graphs and without.

Each worker runs two batches. In the first, all prompts enter one step and then decode together, so that a Python host
can run the same steps. In the second, prompts enter in chunks together with decodes, and too few pages cause
preemptions. The expected tokens come from transformers on the same device.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from xllm_executor import ModelExecutor
from xllm_metadata import allocate_caches, build_attention_metadata
from xllm_models import load_model
from xllm_text.worker import Worker

GPU, MULTI_GPU = pytest.mark.gpu, pytest.mark.multi_gpu
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="cuda", marks=GPU)]
STEPS = {  # the runners that must together have run every step
    "off": {"eager"}, "recorded": {"decode_graph", "piecewise"}, "cudagraphs": {"decode_graph", "piecewise"},
    "piecewise": {"piecewise"},
}  # fmt: skip
MODES = [
    *(pytest.param("cpu", graphs, id=f"cpu-{graphs}") for graphs in ("off", "recorded")),
    *(pytest.param("cuda:0", graphs, id=f"cuda-{graphs}", marks=GPU) for graphs in ("off", "cudagraphs", "piecewise")),
]
PAGE_SIZE, NUM_PAGES, MAX_SEQS, MAX_TOKENS, MAX_LEN, NUM_STEPS = 16, 26, 8, 128, 256, 24
LIMITS = (
    f"--block_size={PAGE_SIZE}", f"--num_blocks={NUM_PAGES}", f"--max_seqs_per_batch={MAX_SEQS}",
    f"--max_tokens_per_batch={MAX_TOKENS}", f"--max_model_len={MAX_LEN}",
)  # fmt: skip
TOGETHER = [[(7 * i + 5 * n) % 250 + 3 for i in range(n)] for n in (1, 2, 7, 8, 9, 20, 31, 50)]  # 128 tokens
MIXED = [([(11 * i + 13 * j) % 250 + 3 for i in range(1 + 37 * j % 101)], 2 + 11 * j % 29) for j in range(20)]

Record = Callable[[str, object], None]
Json = dict[str, Any]


def save(config: Any, folder: Path, *, twins: bool = False) -> Path:
    """A random checkpoint with logits of a few units. `twins`: tokens i and i + 128 have equal logits."""
    model = (Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM)(config)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * values if "norm" in name else 0.08 * values
    if twins:
        head = model.get_output_embeddings().weight.data
        head[128:] = head[:128]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family, in a shape that every attention backend supports."""
    shape: Json = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 2,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "llama": save(LlamaConfig(**shape), folder / "llama"),
        "qwen3": save(Qwen3Config(**shape, tie_word_embeddings=True), folder / "qwen3"),
        "twins": save(LlamaConfig(**shape), folder / "twins", twins=True),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The output of a worker run."""

    device: str
    tokens: dict[str, list[int]]
    logits: dict[str, list[Json]]  # for each token: {"digest": ..., "top": [[id, value], ...]}
    stats: Json
    step_ms: float  # of the first batch

    def check_runners(self, wanted: set[str]) -> None:
        steps = self.stats["executor"]["steps"]
        assert set(steps) == wanted
        assert sum(steps.values()) == self.stats["scheduler"]["num_steps"]
        assert self.stats["scheduler"]["num_failed_steps"] == 0
        if "eager" not in wanted:
            assert not self.stats["executor"].get("eager_reasons")


@pytest.fixture
def answer(worker_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Transcript]:
    """`answer(checkpoint, *flags)`: runs both batches; all requests of a batch arrive at the same time."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    batches = ([(prompt, NUM_STEPS) for prompt in TOGETHER], MIXED)

    def run(checkpoint: Path, *flags: str) -> Transcript:
        tokens: dict[str, list[int]] = {}
        logits: dict[str, list[Json]] = {}
        times: list[float] = []
        with Worker([str(worker_path), f"--model={checkpoint}", *LIMITS, *flags]) as worker:
            device = worker.ready()["device"]
            for number, batch in enumerate(batches):
                worker.send({"command": "pause"})
                for i, (prompt, count) in enumerate(batch):
                    worker.send(request(f"{number}.{i}", prompt, count))
                worker.send({"command": "resume"})
                num_left = len(batch)
                while num_left > 0:
                    event = worker.read_event()
                    assert "error" not in event, event
                    num_left -= bool(event.get("finished"))
                    if "token_ids" in event:
                        tokens.setdefault(event["id"], []).extend(event["token_ids"])
                        logits.setdefault(event["id"], []).append(event["logits"])
                    if number == 0:
                        times.append(time.monotonic())
            worker.send({"command": "stats"})
            stats = worker.read_event()
            assert worker.close() == 0
        counts = {f"{n}.{i}": count for n, batch in enumerate(batches) for i, (_, count) in enumerate(batch)}
        assert {name: len(answer) for name, answer in tokens.items()} == counts
        step_ms = 1e3 * (times[-1] - times[0]) / (NUM_STEPS - 1)
        return Transcript(device=device, tokens=tokens, logits=logits, stats=stats, step_ms=step_ms)

    return run


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """One thread, as in the worker: on a CPU, the order of a sum depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def request(name: str, prompt: Sequence[int], count: int) -> Json:
    return {"id": name, "token_ids": prompt, "max_tokens": count, "ignore_eos": True, "show_logits": True}


def reference_logits(checkpoint: Path, transcript: Transcript, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """transformers' logits [tokens, vocabulary] fp32 for every token of every answer, given the tokens before it."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(transcript.device)
    prompts = [TOGETHER, [prompt for prompt, _ in MIXED]]
    result = {}
    with torch.no_grad():
        for name, answer in transcript.tokens.items():
            batch, i = map(int, name.split("."))
            ids = torch.tensor([prompts[batch][i] + answer[:-1]], device=transcript.device)
            result[name] = model(ids).logits[0, -len(answer) :].float().cpu()
    return result


def check_tokens(checkpoint: Path, transcript: Transcript, dtype: str, record: Record) -> None:
    """fp32: every token equals transformers'.

    bf16: the error to fp32 is at most twice that of transformers in bf16; each token is the argmax up to that error.
    """
    reference = reference_logits(checkpoint, transcript, torch.float32)
    tokens = torch.cat([torch.tensor(transcript.tokens[name]) for name in reference])
    rows = torch.cat(list(reference.values()))
    tops = [top["top"] for name in reference for top in transcript.logits[name]]
    error = max(abs(value - rows[i, token].item()) for i, top in enumerate(tops) for token, value in top)
    best = rows.topk(2).values
    lost = best[:, 0] - rows.gather(1, tokens[:, None])[:, 0]  # 0 for the argmax
    num_equal = int((tokens == rows.argmax(-1)).sum())
    margin = (best[:, 0] - best[:, 1]).min().item()
    record(
        "tokens",
        f"{num_equal} of {len(tokens)} as transformers' in fp32, lost at most {lost.max():.2g}; logits within "
        f"{error:.2g}, the smallest margin {margin:.2g}; {transcript.step_ms:.2f} ms per step of {MAX_SEQS}",
    )
    if dtype == "float32":
        assert num_equal == len(tokens)
        assert error < 1e-3
        return
    own = reference_logits(checkpoint, transcript, torch.bfloat16)
    assert error <= 2 * max((own[name] - reference[name]).abs().max().item() for name in reference)
    assert lost.max().item() <= 2 * error


def python_host(checkpoint: Path, device: str, dtype: str, graphs: str) -> tuple[dict[str, list[int]], list[str]]:
    """Runs the first batch with a Python executor. Returns tokens, and the digests of all logits rows in step order."""
    config = {"python_graph_backend": graphs, "max_tokens_per_batch": MAX_TOKENS, "max_model_len": MAX_LEN}
    model = load_model(str(checkpoint), device=device, dtype=dtype)
    executor = ModelExecutor(model, config, MAX_SEQS)
    sizes = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    executor.bind_kv_caches(allocate_caches(model.cache_specs, **sizes, device=device))
    executor.warmup()
    num_pages = [-(-(len(prompt) + NUM_STEPS) // PAGE_SIZE) for prompt in TOGETHER]
    tables = [list(range(end - count, end)) for count, end in zip(num_pages, accumulate(num_pages), strict=True)]
    new, cached = [list(prompt) for prompt in TOGETHER], [0] * len(TOGETHER)
    answers: dict[str, list[int]] = {f"0.{i}": [] for i in range(len(TOGETHER))}
    digests = []
    for _ in range(NUM_STEPS):
        counts = [len(part) for part in new]
        lens = [before + count for before, count in zip(cached, counts, strict=True)]
        metadata = build_attention_metadata(counts, lens, tables, PAGE_SIZE, device)
        positions = [p for before, after in zip(cached, lens, strict=True) for p in range(before, after)]
        inputs = ([t for part in new for t in part], positions, [end - 1 for end in accumulate(counts)])
        input_ids, position_ids, logits_indices = (torch.tensor(x, dtype=torch.int32, device=device) for x in inputs)
        logits = executor.execute(input_ids, position_ids, metadata, logits_indices).cpu()
        digests += [digest(row.view(torch.uint8).numpy().tobytes()) for row in logits]
        new, cached = [[int(token)] for token in logits.float().argmax(-1)], lens
        for answer, part in zip(answers.values(), new, strict=True):
            answer += part
    executor.shutdown()
    return answers, digests


def digest(data: bytes) -> str:
    """FNV-1a, as in the worker's sampler.cpp."""
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % (1 << 64)
    return f"{value:016x}"


def pairs(device: str) -> list[tuple[str, str]]:
    every = [(family, dtype) for family in ("llama", "qwen3") for dtype in ("float32", "bfloat16")]
    return every if device != "cpu" else [("llama", "float32"), ("qwen3", "bfloat16")]


@pytest.mark.parametrize(
    ("device", "graphs", "family", "dtype"),
    [
        pytest.param(*mode.values, *pair, id="-".join((str(mode.id), *pair)), marks=mode.marks)
        for mode in MODES
        for pair in pairs(str(mode.values[0]))
    ],
)
@pytest.mark.usefixtures("_one_thread")
def test_tokens_equal_transformers_and_logits_equal_a_python_host(
    checkpoints: dict[str, Path], answer: Callable[..., Transcript], record_property: Record, device: str, graphs: str,
    family: str, dtype: str,
) -> None:  # fmt: skip
    flags = (f"--device={device}", f"--dtype={dtype}", f"--python_graph_backend={graphs}")
    transcript = answer(checkpoints[family], *flags)
    assert transcript.device == device
    transcript.check_runners(STEPS[graphs])
    assert transcript.stats["scheduler"]["num_preemptions"] > 0
    check_tokens(checkpoints[family], transcript, dtype, record_property)
    tokens, digests = python_host(checkpoints[family], device, dtype, graphs)
    for name, own in tokens.items():
        assert transcript.tokens[name] == own
    rows = (transcript.logits[name][step] for step in range(NUM_STEPS) for name in tokens)
    assert [row["digest"] for row in rows] == digests


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "dtype", "enable_graph"), [("llama", "float32", 0), ("qwen3", "bfloat16", 1)])
def test_the_native_model_on_the_device(
    checkpoints: dict[str, Path], answer: Callable[..., Transcript], record_property: Record, device: str, family: str,
    dtype: str, enable_graph: int,
) -> None:  # fmt: skip
    flags = (f"--device={device}", f"--dtype={dtype}", "--model_impl=native")
    transcript = answer(checkpoints[family], *flags, f"--enable_graph={'true' if enable_graph else 'false'}")
    transcript.check_runners({"decode_graph", "piecewise"} if enable_graph else {"eager"})
    check_tokens(checkpoints[family], transcript, dtype, record_property)


@pytest.mark.parametrize(
    ("flag", "device"),
    [("--device=cpu", "cpu"), pytest.param("--device_id=0", "cuda:0", marks=GPU)],
    ids=["cpu", "cuda"],
)
def test_ties_go_to_the_lowest_token(
    checkpoints: dict[str, Path], answer: Callable[..., Transcript], flag: str, device: str
) -> None:
    """Tokens i and i + 128 have equal logits."""
    transcript = answer(checkpoints["twins"], flag, "--dtype=bfloat16")
    assert transcript.device == device
    for name, answered in transcript.tokens.items():
        for token, logits in zip(answered, transcript.logits[name], strict=True):
            highest = logits["top"][0][1]
            equal = [other for other, value in logits["top"] if value == highest]
            assert len(equal) > 1
            assert token == min(equal) < 128


@pytest.mark.parametrize(
    ("flags", "graphs", "runners"),
    [
        pytest.param(("--device=cpu",), "recorded", STEPS["recorded"], id="cpu"),
        pytest.param(("--device=cuda:0", "--tp_backend=gloo"), "off", STEPS["off"], id="one-device", marks=GPU),
        # gloo cannot be captured, so graphs are split at the collectives and decode runs piecewise.
        pytest.param(
            ("--device=cuda:0", "--tp_backend=gloo"), "cudagraphs", {"piecewise"}, id="one-device-graphs", marks=GPU
        ),
        pytest.param(("--device=cuda",), "cudagraphs", STEPS["cudagraphs"], id="two-devices", marks=MULTI_GPU),
    ],
)
def test_two_ranks_on_the_device(
    checkpoints: dict[str, Path], answer: Callable[..., Transcript], record_property: Record, flags: tuple[str, ...],
    graphs: str, runners: set[str],
) -> None:  # fmt: skip
    flags += ("--dtype=float32", "--tp_size=2", f"--python_graph_backend={graphs}")
    transcript = answer(checkpoints["llama"], *flags)
    transcript.check_runners(runners)
    check_tokens(checkpoints["llama"], transcript, "float32", record_property)


@pytest.mark.parametrize(("device", "graphs"), [MODES[1], MODES[3]])
def test_a_signal_ends_a_busy_worker_within_two_seconds(
    checkpoints: dict[str, Path], worker_path: Path, record_property: Record, device: str, graphs: str
) -> None:
    flags = (f"--device={device}", f"--python_graph_backend={graphs}", "--max_seqs_per_batch=2")
    command = [str(worker_path), f"--model={checkpoints['llama']}", *flags, "--max_tokens_per_batch=16"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, ExitStack() as at_end:
        at_end.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        for name in ("r0", "r1"):
            process.stdin.write(json.dumps(request(name, [5, 6, 7], 2000)) + "\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline()).get("id") != "r1":
            pass
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line) for line in process.stdout]
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        seconds = time.monotonic() - began
    record_property("end", f"{seconds:.2f} s")
    assert seconds < 2
    assert {event["id"] for event in events if "error" in event} == {"r0", "r1"}
