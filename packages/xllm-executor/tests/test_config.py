"""ExecutorConfig: valid options, and the error for each invalid one."""

from __future__ import annotations

import pytest

from xllm_executor import ExecutorConfig


def test_a_mapping_is_parsed() -> None:
    assert ExecutorConfig.from_mapping({}) == ExecutorConfig()
    config = ExecutorConfig.from_mapping({"max_model_len": 64, "validate": True})
    assert (config.max_model_len, config.validate) == (64, True)
    assert ExecutorConfig(graph_cut_ops="xllm::a, xllm::b").cut_ops == ("xllm::a", "xllm::b")


@pytest.mark.parametrize(
    ("options", "runtime"),
    [
        ({"python_graph_backend": "off"}, None),
        ({"python_graph_backend": "cudagraphs"}, "cuda"),
        ({"python_graph_backend": "piecewise"}, "cuda"),
        ({"python_graph_backend": "piecewise", "graph_runtime": "recorded"}, "recorded"),
        ({"python_graph_backend": "recorded"}, "recorded"),
        ({"python_graph_backend": "eager"}, None),
    ],
)
def test_the_graph_runtime_of_each_backend(options: dict[str, object], runtime: str | None) -> None:
    assert ExecutorConfig.from_mapping(options).runtime == runtime


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_modle_len": 1, "zz": 2},
            r"unknown executor options \['max_modle_len', 'zz'\]; known are .*max_model_len",
        ),
        ({"max_model_len": "64"}, "executor option max_model_len is '64'; it must be of type int"),
        ({"max_model_len": True}, "executor option max_model_len is True; it must be of type int"),
        ({"validate": 1}, "executor option validate is 1; it must be of type bool"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch is 0; it must be at least 1"),
        ({"max_model_len": -1}, "max_model_len is -1; it must be at least 0"),
        (
            {"python_graph_backend": "nope"},
            r"python_graph_backend is 'nope'; available are \[.*'cudagraphs', 'off', 'piecewise', 'recorded'\] and the "
            r"torch.compile backends \[.*'inductor'",
        ),
        (
            {"python_graph_backend": "piecewise", "graph_runtime": "nope"},
            r"graph_runtime is 'nope'; available are \['cuda', 'recorded'\]",
        ),
        (
            {"graph_runtime": "recorded"},
            "graph_runtime is 'recorded' with python_graph_backend 'off'; only 'piecewise'",
        ),
        ({"graph_buckets": "4,2"}, r"graph buckets are \[4, 2\]; they must be rising numbers"),
        ({"graph_token_budget": -1}, "graph_token_budget is -1; it must be at least 0"),
    ],
)
def test_errors_name_option_value_and_limit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExecutorConfig.from_mapping(options)
