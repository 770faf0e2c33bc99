"""Renders a user's message with the chat template of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render_chat(model_dir: Path, message: str) -> str:
    """The prompt for one user message, special tokens included as text.

    The template is the checkpoint's `chat_template.jinja` or the `chat_template` of its `tokenizer_config.json`.

    Raises:
        ValueError: the checkpoint has no template, the template fails, or a file cannot be read.
    """
    config_path = model_dir / "tokenizer_config.json"
    config = _read_object(config_path) if config_path.is_file() else {}
    template_path = model_dir / "chat_template.jinja"
    template = _read_text(template_path) if template_path.is_file() else config.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{model_dir} has no chat template; leave out --chat for a plain completion")
    special = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True, **special
        )
    except Exception as error:  # a template can raise anything, such as a TypeError or a RecursionError
        raise ValueError(f"the chat template of {model_dir} fails: {error}") from error


def _read_object(path: Path) -> dict[str, object]:
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _token_text(token: object) -> str:
    if isinstance(token, dict):  # a token with its properties
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
