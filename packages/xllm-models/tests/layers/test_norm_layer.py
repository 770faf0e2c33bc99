"""The residual layer norm against PyTorch's. `passes/test_partial_sums.py` and xllm-executor's check test sums."""

from __future__ import annotations

import pytest
import torch

from xllm_models.layers import ResidualLayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_layer_norm_is_torch_s_after_a_sum(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, want = ResidualLayerNorm(16, 1e-3, bias=bias).to(dtype), torch.nn.LayerNorm(16, 1e-3, bias=bias).to(dtype)
    for parameter in want.parameters():
        torch.nn.init.normal_(parameter)
    norm.load_state_dict(want.state_dict())
    x, residual = torch.randn(2, 3, 16, dtype=dtype).unbind()
    for before, total in ((None, x), (residual, x + residual)):
        normed, handed_on = norm(x, before)
        assert torch.equal(normed, want(total))
        assert torch.equal(handed_on, total)
