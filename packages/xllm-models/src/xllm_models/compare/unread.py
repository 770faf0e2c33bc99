"""Finds the keys of a config.json that neither the parsing nor the model reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..causal_lm import CausalLM
from ..config import ConfigKeys

# Keys of transformers' configurations without an effect on inference, and of generation.
_NO_EFFECT = frozenset(
    (
        "architectures",
        "model_type",
        "text_model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "classifier_dropout",
        "dropout",
        "pad_token_id",
        "sep_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "router_jitter_noise",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "is_decoder",
        "is_encoder_decoder",
        "add_cross_attention",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "_name_or_path",
        "auto_map",
        "_attn_implementation",
        "_attn_implementation_autoset",
    )
)


class _Recorder(dict[str, Any]):
    """A mapping that notes the keys that are read. A copy of it notes nothing."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)


class ReadKeys:
    """Watches which keys `model` reads: when it is built, and while its config is replaced by `watching`."""

    def __init__(self, model: CausalLM, raw: Mapping[str, Any]) -> None:
        self._model = model
        self._raw = raw
        self._read: set[str] = set()
        with _watched_parsing(self._read):
            type(model).parse_config(_Recorder(raw, self._read))
        own = set(type(model).own_config)
        self._read -= own  # parsed, but the model itself has to read them from `config.own`
        self._config = replace(model.config, own=_Recorder(model.config.own, self._read))
        if own:
            type(model)(self._config, device="meta", dtype=model.dtype)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, the model's config notes what is read of the family's own keys."""
        before, self._model.config = self._model.config, self._config
        try:
            yield
        finally:
            self._model.config = before

    def unread(self) -> list[str]:
        """`key=value` of each key that nobody has read, without null and keys that have no effect on inference."""
        left = {key: value for key, value in self._raw.items() if key not in self._read | _NO_EFFECT}
        return [f"{key}={value!r}" for key, value in left.items() if value is not None]


@contextmanager
def _watched_parsing(read: set[str]) -> Iterator[None]:
    find = ConfigKeys.find

    def watched(self: ConfigKeys, *names: str) -> Any:
        read.update(names)
        return find(self, *names)

    ConfigKeys.find = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigKeys.find = find  # type: ignore[method-assign]
