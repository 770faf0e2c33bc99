"""Renders a user's message with the chat template of a checkpoint, as transformers does."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def render_chat(model_dir: Path, message: str) -> str | None:
    """The prompt for one user message, special tokens included as text; None when the checkpoint has no template.

    The template is the checkpoint's `chat_template.jinja`, or the `chat_template` of its `tokenizer_config.json`. Of
    several named templates, it is the one named `default`.

    Raises:
        ValueError: the template fails, or a file cannot be read.
    """
    config_path = model_dir / "tokenizer_config.json"
    config = _read_object(config_path) if config_path.is_file() else {}
    template_path = model_dir / "chat_template.jinja"
    template = _read_text(template_path) if template_path.is_file() else _default(config.get("chat_template"))
    if template is None:
        return None
    special = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special,
        )
    except Exception as error:  # a template can raise anything, such as a TypeError or a RecursionError
        raise ValueError(f"the chat template of {model_dir} fails: {error}; --raw leaves it out") from error


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training in some templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _default(template: object) -> str | None:
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


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


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own filter escapes for HTML


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
