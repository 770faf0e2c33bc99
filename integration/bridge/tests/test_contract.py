"""The C++ side of the contract: structs to dicts and back, host mirrors, the current device, no allocation per step."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xllm_executor import ExecutorConfig
from xllm_metadata import build_attention_metadata
from xllm_models import ModelConfig, get_model_class, supported_models

Ask = Callable[[str, Any], Any]


@pytest.fixture(scope="session")
def ask_raw(hosts: Path) -> Iterator[Ask]:
    """`ask_raw(call, value)`: contract_host's whole answer."""
    process = subprocess.Popen(
        [str(hosts / "contract_host"), sys.executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask(call: str, value: Any) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"call": call, "value": value}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.communicate()
    assert process.returncode == 0


@pytest.fixture(scope="session")
def ask(ask_raw: Ask) -> Ask:
    """`ask(call, value)`: the answer's value."""
    return lambda call, value: ask_raw(call, value)["value"]


@pytest.fixture(scope="session")
def error_of(ask_raw: Ask) -> Ask:
    """`error_of(call, value)`: the answer's error."""
    return lambda call, value: ask_raw(call, value)["error"]


SAMPLE = {
    "flag": True,
    "small": -3,
    "ratio": 2.0,
    "text": "é\n",
    "maybe": 7,
    "inner": {"count": 2, "names": ["a", "b"]},
    "inners": [{"count": 4, "names": []}, {"count": 5, "names": ["c"]}],
}


LINEAR: dict[str, Any] = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "gemma3_text": {
        "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh",
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": 16},
    "olmo2": {"attention_bias": True},
    "gpt_oss": {
        "head_dim": 32, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 5.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
        },
    },
    "qwen3_next": LINEAR | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1, "mlp_only_layers": [0],
    },
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    },
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.25},
    "deepseek_v2": {
        "num_key_value_heads": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": None, "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        "num_key_value_heads": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": 16, "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        "head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 2,
        "first_k_dense_replace": 2, "routed_scaling_factor": 1.5, "partial_rotary_factor": 0.25,
    },
    "phi3": {
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    },
}  # fmt: skip
# Checkpoints with a vision tower, of which the text model is served.
FAMILIES |= {
    "gemma3": FAMILIES["gemma3_text"], "mistral3": FAMILIES["mistral"], "ministral": FAMILIES["mistral"],
    "qwen3_5": FAMILIES["qwen3_5_text"], "qwen3_5_moe": FAMILIES["qwen3_5_moe_text"], "qwen2_vl": FAMILIES["qwen2"],
    "qwen2_5_vl": FAMILIES["qwen2"], "qwen3_vl": FAMILIES["qwen3"],
}  # fmt: skip


def test_reflected_structs_cross_and_come_back(ask: Ask) -> None:
    assert ask("sample", SAMPLE) == SAMPLE
    defaults = {"flag": False, "small": 0, "ratio": 0.5, "text": "", "maybe": None, "inner": {"count": 1, "names": []}}
    assert ask("sample", {}) == {**defaults, "inners": []}
    assert ask("sample", {"maybe": None, "ratio": 3})["ratio"] == 3.0


def test_model_args_are_what_a_model_says(ask: Ask) -> None:
    """Every key of to_model_args, rope variants included, is a property in C++."""
    base = {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": [2, 3],
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    scalings = (
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.1},
    )  # fmt: skip
    for scaling in scalings:
        args = ModelConfig.from_dict({**base, "rope_scaling": scaling}).to_model_args()
        crossed = ask("model_args", args)
        assert {key: crossed[key] for key in args} == args


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_model_args_of_every_family(ask: Ask, model_type: str) -> None:
    base = {
        "model_type": model_type, "vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    args = get_model_class(model_type).parse_config({**base, **FAMILIES[model_type]}).to_model_args()
    crossed = ask("model_args", args)
    assert {key: crossed[key] for key in args} == args


def test_a_familys_own_keys_cross(ask: Ask) -> None:
    base = {
        "model_type": "granite", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    own = {"logits_scaling": 8.0, "kind": "text"}
    crossed = ask("model_args", ModelConfig.from_dict(base | {"logits_scaling": 4.0}, own=own).to_model_args())
    assert ModelConfig.from_dict(crossed, own=own).own == {"logits_scaling": 4.0, "kind": "text"}
    assert ask("model_args", ModelConfig.from_dict(base).to_model_args())["own_config"] is None


def test_every_family_is_in_the_table() -> None:
    assert {name for name in supported_models() if "For" not in name} <= set(FAMILIES)


def test_parallel_args(ask: Ask) -> None:
    value = {"tp_rank": 1, "tp_size": 2, "host": "10.0.0.1", "port": 7}
    assert ask("parallel_args", value) == value


@pytest.mark.parametrize(
    ("call", "value", "error"),
    [
        ("parallel_args", {"nope": 1, "zz": 2}, "args has unknown keys: nope, zz"),
        ("parallel_args", {"tp_rank": "1"}, "args.tp_rank is '1'; it must be an int"),
        ("parallel_args", {"tp_rank": True}, "args.tp_rank is True; it must be an int"),
        ("sample", {"flag": 1}, "args.flag is 1; it must be a bool"),
        ("sample", {"ratio": "x"}, "args.ratio is 'x'; it must be a float"),
        ("sample", {"text": 5}, "args.text is 5; it must be a str"),
        ("sample", {"inner": []}, "args.inner is []; it must be a dict"),
        ("sample", {"inners": {}}, "args.inners is {}; it must be a list"),
        ("sample", {"inner": {"cuont": 1}}, "args.inner has unknown keys: cuont"),
        ("sample", {"inners": [{}, {"count": None}]}, "args.inners[1].count is None; it must be an int"),
        ("sample", {"inner": {"names": ["a", 2]}}, "args.inner.names[1] is 2; it must be a str"),
        ("sample", {"small": 2**31}, "args.small is 2147483648; it must be within the range of its C++ type"),
    ],
)
def test_errors_name_the_key(error_of: Ask, call: str, value: Any, error: str) -> None:
    assert error_of(call, value) == error


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(), page_size=st.sampled_from([1, 4, 16, 128]), kind=st.sampled_from(["prefill", "chunked", "decode"])
)
def test_completed_mirrors_are_the_builders(ask: Ask, data: st.DataObject, page_size: int, kind: str) -> None:
    kv_lens = data.draw(st.lists(st.integers(1 if kind == "decode" else 0, 300), max_size=8))
    q_lens = [{"decode": 1, "prefill": kv_len}.get(kind, data.draw(st.integers(0, kv_len))) for kv_len in kv_lens]
    tables = [list(range(-(-kv_len // page_size))) for kv_len in kv_lens]
    step = build_attention_metadata(q_lens, kv_lens, tables, page_size)
    given_fields = {
        "kv_seq_lens_host": step.kv_seq_lens_host.tolist(),
        "is_prefill": step.is_prefill,
        "is_chunked_prefill": step.is_chunked_prefill,
        "page_size": page_size,
    }
    if step.is_chunked_prefill:
        assert step.qo_indptr_host is not None
        given_fields["qo_indptr_host"] = step.qo_indptr_host.tolist()
    completed = ask("mirrors", given_fields)
    for name in ("kv_seq_lens_host", "paged_kv_indptr_host", "paged_kv_last_page_len_host", "qo_indptr_host"):
        expected = getattr(step, name)
        assert completed[name] == (None if expected is None else expected.tolist()), name
    assert (completed["max_query_len"], completed["max_seq_len"]) == (step.max_query_len, step.max_seq_len)


def test_mirrors_that_are_present_stay(ask: Ask) -> None:
    value = {"kv_seq_lens_host": [0, 6], "paged_kv_indptr_host": [0, 9], "page_size": 4, "max_seq_len": 77}
    completed = ask("mirrors", value)
    assert completed["paged_kv_indptr_host"] == [0, 9]
    assert completed["max_seq_len"] == 77
    assert completed["paged_kv_last_page_len_host"] == [2]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"page_size": 4}, "kv_seq_lens_host is absent; the other mirrors derive from it"),
        ({"kv_seq_lens_host": [0], "page_size": 0}, "page_size is 0; it must be at least 1"),
        (
            {"kv_seq_lens_host": [0, 3], "is_chunked_prefill": True, "page_size": 4},
            "qo_indptr_host is absent; in a chunked step no other field determines it",
        ),
        ({"kv_seq_lens_host": [[0, 3]], "page_size": 4}, "kv_seq_lens_host must be a contiguous int32 tensor [B + 1]"),
        (
            {"kv_seq_lens_host": [6, 5], "page_size": 4},
            "kv_seq_lens_host[0] is 6; it must be 0: lengths are cumulative",
        ),
        (
            {"kv_seq_lens_host": [0, 5, 3, 9], "page_size": 4},
            "kv_seq_lens_host[2] is 3; kv_seq_lens_host[1] is 5, and it must not fall below that",
        ),
        (
            {"kv_seq_lens_host": [0], "qo_indptr_host": [0, 1], "is_chunked_prefill": True, "page_size": 4},
            "qo_indptr_host has 2 entries; B + 1 is 1 in kv_seq_lens_host",
        ),
        (
            {"kv_seq_lens_host": [0, 9], "qo_indptr_host": [0], "is_chunked_prefill": True, "page_size": 4},
            "qo_indptr_host has 1 entries; B + 1 is 2 in kv_seq_lens_host",
        ),
        (
            {
                "kv_seq_lens_host": [0, 9, 12],
                "qo_indptr_host": [0, 4, 1],
                "is_chunked_prefill": True,
                "max_query_len": 4,
                "page_size": 4,
            },
            "qo_indptr_host[2] is 1; qo_indptr_host[1] is 4, and it must not fall below that",
        ),
    ],
)
def test_mirrors_that_cannot_be_completed_are_named(error_of: Ask, value: Any, error: str) -> None:
    assert error in error_of("mirrors", value)


def test_python_runs_with_the_models_device_as_the_current_one(ask: Ask) -> None:
    """The host's thread has another current device before and after each call. The devices are fakes."""
    calls = ("load_weights", "executor", "bind_kv_caches", "warmup", "execute", "logits", "shutdown")
    assert ask("devices", None) == dict.fromkeys(calls, 2) | {"here": 1}


def test_a_step_allocates_no_tensor(hosts: Path, run_program: Callable[..., Any]) -> None:
    result = json.loads(run_program(hosts / "step_benchmark", sys.executable, 64, 1).stdout)
    assert result["allocations_per_step"] == 0
    assert result["allocations_of_one_tensor"] == 1


def test_the_config_struct_has_the_options_and_defaults_of_the_executor(ask: Ask) -> None:
    assert list(ask("config", None).items()) == list(dataclasses.asdict(ExecutorConfig()).items())
