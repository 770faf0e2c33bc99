"""Strict loading: the errors list every tensor at fault, nothing is written on a mismatch, reloading is in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from xllm_models import CausalLM, DictStateDict, ModelConfig, TensorParallel, WeightError, load_model
from xllm_models.models.llama import LlamaForCausalLM

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
Q = "model.layers.1.self_attn.q_proj.weight"


def build(**change: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(ModelConfig.from_dict(CONFIG | change))


def checkpoint(*, tied: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of the model, by HF's names, written out by hand."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    if not tied:
        shapes["lm_head.weight"] = (11, 8)
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {
            layer + "input_layernorm.weight": (8,),
            layer + "post_attention_layernorm.weight": (8,),
            layer + "self_attn.q_proj.weight": (8, 8),
            layer + "self_attn.k_proj.weight": (4, 8),
            layer + "self_attn.v_proj.weight": (4, 8),
            layer + "self_attn.o_proj.weight": (8, 8),
            layer + "mlp.gate_proj.weight": (12, 8),
            layer + "mlp.up_proj.weight": (12, 8),
            layer + "mlp.down_proj.weight": (8, 12),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def snapshot(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def test_fused_parameters_hold_their_sources_in_order() -> None:
    model, tensors = build(), checkpoint()
    model.load_weights([DictStateDict(tensors)])
    layer = "model.layers.1."
    qkv = torch.cat([tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qkv"])
    gate_up = torch.cat([tensors[f"{layer}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    got = dict(model.named_parameters())
    assert torch.equal(got[layer + "self_attn.qkv_proj.weight"], qkv)
    assert torch.equal(got[layer + "mlp.gate_up_proj.weight"], gate_up)
    assert torch.equal(got["lm_head.weight"], tensors["lm_head.weight"])


def test_one_error_lists_every_fault_and_nothing_is_written() -> None:
    model, tensors = build(), checkpoint()
    model.load_weights([DictStateDict(tensors)])
    before = snapshot(model)
    faulty = checkpoint(seed=1)
    del faulty[Q], faulty["model.norm.weight"]
    faulty |= {"model.layers.7.extra": torch.zeros(1), "another": torch.zeros(1)}
    faulty["model.layers.0.mlp.up_proj.weight"] = torch.zeros(12, 9)
    faulty["lm_head.weight"] = torch.zeros(11, 8, dtype=torch.int8)
    with pytest.raises(WeightError) as error:
        model.load_weights([DictStateDict(faulty)])
    assert str(error.value).splitlines() == [
        "the checkpoint does not fit the model",
        f"  missing: {Q}, model.norm.weight",
        "  unexpected: another, model.layers.7.extra",
        "  wrong shape: model.layers.0.mlp.up_proj.weight (checkpoint [12, 9], model [12, 8])",
        "  wrong dtype: lm_head.weight (torch.int8)",
    ]
    assert isinstance(error.value, ValueError)
    assert all(torch.equal(before[name], now) for name, now in model.named_parameters())


def test_a_tensor_in_two_files_is_an_error() -> None:
    with pytest.raises(WeightError, match=f"in more than one file: {Q}"):
        build().load_weights([DictStateDict(checkpoint()), DictStateDict({Q: torch.zeros(8, 8)})])


def test_files_may_split_a_fused_parameter() -> None:
    tensors = checkpoint()
    halves = [DictStateDict(dict(list(tensors.items())[start::2])) for start in (0, 1)]
    model, whole = build(), build()
    model.load_weights(halves)
    whole.load_weights([DictStateDict(tensors)])
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), whole.parameters(), strict=True))


def test_a_tied_head_may_be_absent_present_or_the_only_one() -> None:
    tensors = checkpoint(tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    only_head = {name: tensor for name, tensor in tensors.items() if "embed" not in name}
    for variant in (tensors, tensors | {"lm_head.weight": embedding}, only_head | {"lm_head.weight": embedding}):
        model = build(tie_word_embeddings=True)
        assert model.lm_head.weight is model.get_parameter("model.embed_tokens.weight")
        model.load_weights([DictStateDict(variant)])
        assert torch.equal(model.lm_head.weight, embedding)


def test_a_tied_head_with_other_values_or_shape_is_an_error() -> None:
    tensors = checkpoint(tied=True)
    model = build(tie_word_embeddings=True)
    with pytest.raises(WeightError, match=r"ties word embeddings, but lm_head.weight and model.embed_tokens.weight"):
        model.load_weights([DictStateDict(tensors | {"lm_head.weight": torch.zeros(11, 8)})])
    with pytest.raises(WeightError, match=r"wrong shape: lm_head.weight \(checkpoint \[12, 8\], model \[11, 8\]\)"):
        model.load_weights([DictStateDict(tensors | {"lm_head.weight": torch.zeros(12, 8)})])
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(WeightError, match=r"missing: model.embed_tokens.weight"):
        model.load_weights([DictStateDict(tensors)])


def test_an_untied_head_must_be_there() -> None:
    with pytest.raises(WeightError, match=r"missing: lm_head.weight"):
        build().load_weights([DictStateDict(checkpoint(tied=True))])


def test_loading_again_copies_in_place() -> None:
    model = build(tie_word_embeddings=True)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    for seed in (0, 1):
        tensors = checkpoint(tied=True, seed=seed)
        model.load_weights([DictStateDict(tensors)])
        assert torch.equal(model.get_parameter("model.norm.weight"), tensors["model.norm.weight"])
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_dtypes_are_converted_on_load() -> None:
    model = LlamaForCausalLM(CONFIG, dtype=torch.bfloat16)
    tensors = checkpoint()
    model.load_weights([DictStateDict(tensors)])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.get_parameter("model.norm.weight"), tensors["model.norm.weight"].bfloat16())


class MinimalStateDict:
    """What a C++ view offers at least: has, get_tensor and keys as a plain list."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def keys(self) -> Iterable[str]:
        return list(self.tensors)


def test_any_object_with_the_three_methods_loads() -> None:
    model, other = build(), build()
    model.load_weights([MinimalStateDict(checkpoint())], 0, 1)
    other.load_weights([DictStateDict(checkpoint())])
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 do not fit a model built as rank 0 of 1"):
        build().load_weights([DictStateDict(checkpoint())], 1, 2)


def test_the_progress_bar_is_on_stderr_and_only_when_asked(
    write_checkpoint: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    _, directory = write_checkpoint("llama")
    capsys.readouterr()
    load_model(directory)
    assert capsys.readouterr() == ("", "")
    load_model(directory, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading weights: 100%" in err


def shards(size: int, **change: Any) -> list[LlamaForCausalLM]:
    return [LlamaForCausalLM(CONFIG | change, tp=TensorParallel(rank=rank, size=size)) for rank in range(size)]


def test_padding_rows_of_a_cut_vocabulary_are_zero_also_after_loading_again() -> None:
    first, last = shards(2)
    for _ in range(2):
        for rank, model in enumerate((first, last)):
            model.get_parameter("model.embed_tokens.weight").fill_(torch.nan)
            model.load_weights([DictStateDict(checkpoint())], rank, 2)
    rows = torch.cat([model.get_parameter("model.embed_tokens.weight") for model in (first, last)])
    assert torch.equal(rows[:11], checkpoint()["model.embed_tokens.weight"])
    assert torch.equal(rows[11:], torch.zeros(1, 8))


class CountingStateDict(DictStateDict):
    """Slices lazily and counts the elements that were read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.num_read = 0

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = super().get_tensor(name)
        self.num_read += tensor.numel()
        return tensor

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self, super().get_tensor(name))


class CountingSlice:
    def __init__(self, owner: CountingStateDict, tensor: torch.Tensor) -> None:
        self.owner, self.tensor = owner, tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        found = self.tensor[region]
        self.owner.num_read += found.numel()
        return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_own_share_only(size: int) -> None:
    for rank, model in enumerate(shards(size, vocab_size=12)):
        tensors = checkpoint()
        tensors |= {name: torch.ones(12, 8) for name in ("lm_head.weight", "model.embed_tokens.weight")}
        source = CountingStateDict(tensors)
        model.load_weights([source], rank, size)
        assert source.num_read == sum(parameter.numel() for parameter in model.parameters())


class View:
    """A state dict as a C++ class would expose it: three methods, nothing else, and no slices."""

    __slots__ = ("_tensors", "reads")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.reads: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get_tensor(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self._tensors[name]

    def keys(self) -> Iterable[str]:
        return iter(self._tensors)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2), (3, 4)])
def test_any_object_with_has_get_tensor_and_keys_loads_the_same_way(rank: int, size: int) -> None:
    tensors = checkpoint()
    tp = TensorParallel(rank=rank, size=size)
    ours, want = (LlamaForCausalLM(ModelConfig.from_dict(CONFIG), tp=tp) for _ in range(2))
    names = sorted(tensors)
    views = [View({name: tensors[name] for name in part}) for part in (names[::2], names[1::2])]
    ours.load_weights(views, rank, size)
    want.load_weights([DictStateDict(tensors)], rank, size)
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), want.parameters(), strict=True))
    with pytest.raises(WeightError, match=f"missing: {Q}"):
        ours.load_weights([View({name: x for name, x in tensors.items() if name != Q})], rank, size)
