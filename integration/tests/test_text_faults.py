"""The text front with closed streams, arguments and files that are not text, and answers that are empty or cut."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FRONT = Path(__file__).parents[1] / "python"
READY = {"event": "ready", "model_type": "llama", "dtype": "float32", "device": "cpu"}
END = {"id": "0", "finished": True, "finish_reason": "stop"}

# A worker that answers with the lines in `answer`, next to itself, and keeps the request in `request`.
WORKER = """#!/usr/bin/env python3
import pathlib, sys

folder = pathlib.Path(sys.argv[0]).parent
print(READY, flush=True)
(folder / "request").write_text(sys.stdin.readline())
print((folder / "answer").read_text(), end="", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One token for each byte, and <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A folder with the tokenizer and the worker, which answers `ok` until `set_answer`."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    worker = folder / "worker"
    worker.write_text(WORKER.replace("READY", repr(json.dumps(READY))))
    worker.chmod(0o755)
    set_answer(folder, tokenizer.encode("ok").ids)
    return folder


def set_answer(folder: Path, ids: list[int], **end: object) -> None:
    events: list[dict[str, Any]] = [{"id": "0", "token_ids": [token]} for token in ids]
    (folder / "answer").write_text("".join(json.dumps(event) + "\n" for event in [*events, {**END, **end}]))


def run_front(folder: Path, *arguments: str | bytes, shell: str = "", **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a run with the worker of `folder`; `shell` are redirections."""
    options = ["--worker", str(folder / "worker"), "--model", str(folder)]
    command: list[str | bytes] = [sys.executable, "-m", "xllm_text", *(arguments or (*options, "hi"))]
    if shell:
        command = ["bash", "-c", f"{shlex.join(os.fsdecode(part) for part in command)} {shell}"]
    variables = {**os.environ, "PYTHONPATH": str(FRONT), **environment}
    result = subprocess.run(command, capture_output=True, timeout=60, check=False, env=variables)
    return result.returncode, result.stdout.decode(), result.stderr.decode()


def options(folder: Path) -> list[str]:
    return ["--worker", str(folder / "worker"), "--model", str(folder)]


@pytest.mark.parametrize(
    ("template", "flags", "text"),
    [("[user] {{ messages[0].content }}", [], "[user] hi"), ("x", ["--raw"], "hi"), (None, [], "hi")],
)
def test_chat_is_the_default_where_there_is_a_template(
    model_dir: Path, tokenizer: Tokenizer, template: str | None, flags: list[str], text: str
) -> None:
    if template is not None:
        (model_dir / "chat_template.jinja").write_text(template)
    code, out, err = run_front(model_dir, *options(model_dir), *flags, "hi")
    assert (code, out) == (0, "ok\n")
    assert json.loads((model_dir / "request").read_text())["token_ids"] == tokenizer.encode(text).ids
    assert ("the model has no chat template; it continues the prompt\n" in err) == (template is None)


@pytest.mark.parametrize(
    ("text", "flags", "reason", "notes"),
    [
        ("", [], "stop", ["the answer is empty"]),
        ("<end>", [], "stop", ["the answer is empty", "1 tokens, the first after"]),
        (" \n", [], "stop", ["the answer is empty", "2 tokens, the first after"]),
        ("ab", ["--max-tokens=2"], "length", ["the answer is cut: it reached --max-tokens 2", "2 tokens, the first"]),
        ("ab", [], "length", ["the answer is cut: it reached the largest length that the worker serves", "2 tokens"]),
        (" ", ["--max-tokens=1"], "length", ["the answer is cut", "the answer is empty", "1 tokens"]),
        ("ab", [], "stop", ["2 tokens, the first after"]),
    ],
)
def test_an_empty_or_cut_answer_is_said_to_be_so(
    model_dir: Path, tokenizer: Tokenizer, text: str, flags: list[str], reason: str, notes: list[str]
) -> None:
    set_answer(model_dir, tokenizer.encode(text).ids, finish_reason=reason)
    code, _, err = run_front(model_dir, *options(model_dir), *flags, "--raw", "hi")
    lines = err.splitlines()[2:]  # after `loading` and the model
    assert code == 0
    assert len(lines) == len(notes)
    assert all(line.startswith(note) for line, note in zip(lines, notes, strict=True))


def test_the_prompt_is_neither_truncated_nor_padded(model_dir: Path, tokenizer: Tokenizer) -> None:
    for length, prompt in ((4, "a longer prompt"), (40, "hi")):
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length)
        tokenizer.save(str(model_dir / "tokenizer.json"))
        assert run_front(model_dir, *options(model_dir), prompt)[0] == 0
        assert len(json.loads((model_dir / "request").read_text())["token_ids"]) == len(prompt)


@pytest.mark.parametrize(
    ("shell", "code", "out"),
    [
        ("</dev/null", 0, "ok\n"),
        ("<&-", 0, "ok\n"),
        ("2>&-", 0, "ok\n"),
        ("<&- 2>&-", 0, "ok\n"),
        (">&-", 1, "error: stdout is closed\n"),
        ("<&- >&-", 1, "error: stdout is closed\n"),
        ("<&- >&- 2>&-", 1, ""),
        (">/dev/full", 1, "error: No space left on device\n"),
        (">/dev/full 2>&1", 1, ""),
        ("| head -c0; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_closed_and_full_streams(model_dir: Path, shell: str, code: int, out: str) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}")
    got, stdout, stderr = run_front(model_dir, shell=shell)
    assert got == code
    if code == 0:
        assert stdout == out
    else:
        assert stdout == ""
        assert stderr.removeprefix("loading the model ...\nllama, float32 on cpu\n") == out


@pytest.mark.parametrize("arguments", [["--help"], ["fetch", "--help"]])
def test_help_without_a_reader(model_dir: Path, arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "xllm_text", *arguments]
    buffered = {**os.environ, "PYTHONPATH": str(FRONT), "PYTHONUNBUFFERED": ""}  # argparse ignores a failed write
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")
    full = run_front(model_dir, *arguments, shell=">/dev/full", PYTHONUNBUFFERED="")
    assert full == (1, "", "error: No space left on device\n")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_arguments_that_are_not_text(model_dir: Path, locale: str) -> None:
    code, out, err = run_front(model_dir, *options(model_dir), b"caf\xe9", LC_ALL=locale)
    assert (code, out, err) == (1, "", "error: the prompt is not valid UTF-8\n")
    code, out, err = run_front(model_dir, b"--max-tokens=\xff", *options(model_dir), "hi", LC_ALL=locale)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    code, out, err = run_front(model_dir, b"--worker=\xff", "--model", str(model_dir), "--raw", "hi", LC_ALL=locale)
    assert (code, out) == (1, "")
    assert err.splitlines()[1].startswith("error: cannot start the worker ")


def test_paths_need_not_be_text(model_dir: Path) -> None:
    moved = os.fsencode(model_dir) + b"\xff"
    model_dir.rename(os.fsdecode(moved))
    code, out, err = run_front(model_dir, b"--worker=" + moved + b"/worker", b"--model=" + moved, "hi")
    assert (code, out) == (0, "ok\n"), err
    for name in ("config.json", "model.safetensors"):
        Path(os.fsdecode(moved), name).touch()
    command = [sys.executable, "-m", "xllm_text", "fetch", "--out", moved]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=FRONT).stdout == moved + b"\n"


def test_an_answer_with_characters_that_the_locale_lacks(model_dir: Path, tokenizer: Tokenizer) -> None:
    set_answer(model_dir, tokenizer.encode("naïve 😀").ids)
    code, out, _ = run_front(model_dir, PYTHONIOENCODING="ascii")
    assert (code, out) == (0, "na\\xefve \\U0001f600\n")


BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "panics while loaded": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        "is not a tokenizer: Precompiled",
    ),
    "panics while encoding": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "cannot encode the prompt: ",
    ),
    "has no token for unknown text": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        "cannot encode the prompt: WordLevel error: Missing [UNK] token",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizers(model_dir: Path, name: str) -> None:
    path = model_dir / "tokenizer.json"
    change, message = BROKEN[name]
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, out, err = run_front(model_dir, *options(model_dir), "--raw", "hi", RUST_BACKTRACE="1")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {path} {message}")


def test_files_that_cannot_be_read(model_dir: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for model, message in [
        ("x" * 300, "File name too long"),
        (str(loop), "has no tokenizer.json"),
        ("/dev/null", "has no tokenizer.json"),
        ("/proc/self/mem", "has no tokenizer.json"),
    ]:
        code, out, err = run_front(model_dir, "--worker=w", f"--model={model}", "hi")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("error: ")
        assert message in err
    (model_dir / "chat_template.jinja").symlink_to("/proc/self/mem")  # reading it is an input/output error
    code, out, err = run_front(model_dir)
    assert (code, out, err.count("\n")) == (1, "", 1)
    code, out, err = run_front(model_dir, "fetch", "--out", "/proc/none/model")
    assert (code, out, err) == (1, "", "error: /proc/none: No such file or directory\n")


@pytest.mark.parametrize(
    ("ready", "message"),
    [
        ('{"event": "stats"}', "the worker wrote an unknown event: "),
        ('{"event": "ready"}', "the worker wrote an unknown event: "),
        ("\udcff", "the worker wrote a line that is not UTF-8"),
    ],
)
def test_a_worker_that_is_ready_in_another_way(model_dir: Path, ready: str, message: str) -> None:
    worker = model_dir / "worker"
    worker.write_text(f"#!/bin/bash\nprintf '%s\\n' '{ready}'\n", errors="surrogateescape")
    code, out, err = run_front(model_dir, *options(model_dir), "--raw", "hi")
    assert (code, out) == (1, "")
    assert err.startswith(f"loading the model ...\nerror: {message}")
    assert err.count("\n") == 2


def test_a_worker_that_dies_of_a_signal(model_dir: Path) -> None:
    (model_dir / "worker").write_text("#!/bin/bash\nkill -SEGV $$\n")
    code, _, err = run_front(model_dir, *options(model_dir), "--raw", "hi")
    assert (code, err) == (1, "loading the model ...\nerror: the worker was ended by SIGSEGV\n")
