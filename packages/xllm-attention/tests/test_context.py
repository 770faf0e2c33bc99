from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from xllm_attention import AttentionBackend, AttentionSpec, current_backend, forward_context

MakeBackend = Callable[..., AttentionBackend]


def test_nests_and_restores(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    outer, inner = make_backend([spec]), make_backend([spec])
    with forward_context(outer):
        with forward_context(inner):
            assert current_backend() is inner
        with pytest.raises(KeyError), forward_context(inner):
            raise KeyError
        assert current_backend() is outer
    with pytest.raises(RuntimeError, match="outside of a forward context"):
        current_backend()


def test_is_not_shared_with_other_threads(make_backend: MakeBackend, spec: AttentionSpec) -> None:
    with forward_context(make_backend([spec])), ThreadPoolExecutor(1) as pool:
        future = pool.submit(current_backend)
        with pytest.raises(RuntimeError, match="in the same thread"):
            future.result()
