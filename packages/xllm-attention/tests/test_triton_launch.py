"""The launchers of compiled kernels: which of Triton's interfaces they use, and that they load a kernel once."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from xllm_attention import triton_launch
from xllm_attention.triton_launch import KeyedLauncher, Launcher, untested_interface, uses_private_interface

DRIVER = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

loaded, launched = [], []

class Utils:
    def load_binary(self, name, *rest):
        loaded.append(name)
        return "module", "function", 32, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

class Driver:
    utils = Utils()
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)
    launcher_cls = staticmethod(lambda source, metadata: lambda *call: launched.append(call))

driver.set_active(Driver())
"""

PREPARED = """
from xllm_attention.backends.triton_backend.append import append_kernel
from xllm_attention.triton_launch import KeyedLauncher

k = torch.zeros(4, 2, 16)
cache, slots = torch.zeros(8, 4, 2, 16), torch.zeros(4, dtype=torch.int32)
arguments = (k, k, cache, cache, slots, None, None)  # no scales
constants = {"K_STRIDES": k.stride(), "V_STRIDES": k.stride(), "K_CACHE_STRIDES": cache.stride(),
             "V_CACHE_STRIDES": cache.stride(), "PAGE_SIZE": 4, "K": 2, "D": 16, "K_PAD": 2, "D_PAD": 16, "V_DIM": 0}
options = {"num_warps": 4, "maxnreg": None, "launch_pdl": True}
launch = KeyedLauncher(append_kernel)
launch.prepare("one", arguments, constants, options)
assert (len(loaded), launched) == (1, []), (loaded, launched)
launch.prepare("one", arguments, constants, options)
launch("one", (4, 1, 1), arguments, constants, options)
launch("other", (2, 1, 1), arguments, constants, {**options, "num_warps": 2})
launch("other", (3, 1, 1), arguments, constants, {**options, "num_warps": 2})
assert len(loaded) == 2, loaded
assert [call[:5] for call in launched] == [(grid, 1, 1, 7, "function") for grid in (4, 2, 3)], launched
launch.bind("one", (5, 1, 1), arguments, constants, options)()
bound = launched.pop()
assert bound[:5] == (5, 1, 1, 7, "function"), bound
assert bound[9:16] == (*[tensor.data_ptr() for tensor in arguments[:5]], None, None), bound
assert bound[16:] == tuple(constants.values()), bound
for call in launched:
    assert all(ours is theirs for ours, theirs in zip(call[9:16], arguments)), call
    assert call[16:] == tuple(constants.values()), call
"""

PLANNED = """
from dataclasses import replace
from xllm_attention import AttentionSpec
from xllm_attention.backend import Phase, Step
from xllm_attention.backends.triton_backend.workspace import WorkList
from xllm_metadata import FIELDS, build_attention_metadata

def moved(tensor):
    return torch.cat([tensor.new_zeros(1), tensor])[1:]

spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
work = WorkList.allocate(spec, dtype=torch.bfloat16, decode=False, max_num_seqs=100, max_num_tokens=512,
                         num_processors=132, interpreted=False, device=torch.device("cpu"))
pages = torch.zeros(512, dtype=torch.int32)
for num_seqs in (1, 3, 40, 100):
    step = build_attention_metadata([2] * num_seqs, [5] * num_seqs, [[0, 1]] * num_seqs, 4)
    others = {name: moved(getattr(step, name)) for name in ("slot_mapping", "kv_cu_seq_lens", "paged_kv_indices")}
    for metadata in (step, replace(step, **others)):
        work.fill(Step(metadata=metadata, phase=Phase.CHUNKED, graph=False, num_tokens=2 * num_seqs,
                       num_seqs=num_seqs), pages, copies_pages=True)
assert len(launched) == 8
assert loaded == ["worklist_kernel"], loaded
"""


CAPTURED = """
from xllm_attention import AttentionSpec, BackendLimits
from xllm_attention.backends.triton_backend import backend as module
from xllm_metadata import LayerCache, build_attention_metadata

module.INTERPRETED = True  # else it refuses a CPU
spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
limits = BackendLimits(device=torch.device("cpu"), dtype=torch.float16, max_num_seqs=4, max_num_tokens=16,
                       max_model_len=64)
backend = module.TritonBackend([spec, spec], limits)
backend._can_overlap = True
caches = torch.zeros(2, 2, 32, 4, 2, 16, dtype=torch.float16)
backend.bind_kv_caches([LayerCache.from_tensors(tuple(layer)) for layer in caches])
q, k = torch.zeros(2, 4, 16, dtype=torch.float16), torch.zeros(2, 2, 16, dtype=torch.float16)

def run(graph, captured):
    torch.cuda.is_current_stream_capturing = lambda: captured
    loads, launches = len(loaded), len(launched)
    for layer in (0, 1):
        backend.run(q, k, k, torch.empty_like(q), layer)
    assert len(launched) == launches + 2
    return len(loaded) - loads

step = build_attention_metadata([1, 1], [5, 9], [[0, 1], [2, 3, 4]], 4)
backend.plan(step)
assert run(False, False) == 1
backend.plan(step, graph=True)
assert run(True, False) == 1  # what the capture will launch
assert run(True, True) == 0
assert [call[-1] for call in launched[-2:]] == [True, True]  # PDL
assert [call[-1] for call in launched[-4:-2]] == [False, False]
"""


@pytest.mark.parametrize("script", [PREPARED, PLANNED, CAPTURED], ids=["prepared", "planned", "captured"])
def test_kernels_are_loaded_once(script: str) -> None:
    """What was prepared is launched when it is called; steps of any size, laid anywhere, are planned by one kernel;
    attention has its kernels before a capture.

    In a process of its own: here the kernels are interpreted.
    """
    command = [sys.executable, "-c", DRIVER + script]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class FakeKernel:
    """Stands for a `triton.jit` function; records its launches through the public and the private interface."""

    def __init__(self) -> None:
        self.public: list[tuple[Any, ...]] = []
        self.private: list[tuple[Any, ...]] = []
        self.warmups = 0
        self.compiled = SimpleNamespace(
            run=lambda *call: self.private.append(call), function="function", packed_metadata="metadata"
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: object, **options: object) -> object:
            self.public.append((grid, arguments, options))
            return self.compiled

        return launch

    def warmup(self, *arguments: object, grid: tuple[int, ...], **options: object) -> object:
        self.warmups += 1
        return self.compiled


GRID = (3, 2, 1)
BASE = (*GRID, 7, "function", "metadata", None, None, None)  # a direct launch before the kernel's own arguments


@pytest.fixture(params=[True, False], ids=["private", "public"])
def private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Which interface the launchers use; stream 7 is the current one."""
    monkeypatch.setattr(triton_launch, "uses_private_interface", lambda: request.param)
    active = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=active))
    return bool(request.param)


def test_a_launcher_uses_the_interface_that_was_decided(private: bool) -> None:
    kernel, tensors = FakeKernel(), (torch.zeros(4), torch.zeros(4))
    launch = Launcher(kernel, num_warps=4)
    for _ in range(3):
        launch(GRID, tensors, (5,), ("constant",), num_stages=2)
    public = (GRID, (*tensors, 5, "constant"), {"num_warps": 4, "num_stages": 2})
    direct = (*BASE, *tensors, 5, "constant")
    assert kernel.public == [public] * (1 if private else 3)
    assert kernel.private == [direct] * (2 if private else 0)


def test_a_launcher_keeps_variants_apart(private: bool) -> None:
    kernel = FakeKernel()
    launch = Launcher(kernel)
    calls: list[tuple[Any, ...]] = [
        ((torch.zeros(4),), ("constant",), {}),
        ((torch.zeros(4),), ("other",), {}),
        ((torch.zeros(4).half(),), ("constant",), {}),
        ((torch.zeros(4),), ("constant",), {"num_warps": 8}),
    ]
    for _ in range(2):
        for tensors, constants, options in calls:
            launch(GRID, tensors, (), constants, **options)
    assert len(kernel.public) == (4 if private else 8)
    unaligned = torch.zeros(5)[1:]
    for _ in range(2):
        launch(GRID, (unaligned,), (), ("constant",))
    assert len(kernel.public) == (6 if private else 10)  # Triton finds the variant for its alignment


def test_a_keyed_launcher_uses_the_interface_that_was_decided(private: bool) -> None:
    kernel, tensor = FakeKernel(), torch.zeros(4)
    launch = KeyedLauncher(kernel)
    for _ in range(3):
        launch("key", GRID, (tensor, 5), {"SIZE": 16}, {"num_warps": 4})
    public, direct = (GRID, (tensor, 5), {"SIZE": 16, "num_warps": 4}), (*BASE, tensor, 5, 16)
    assert kernel.public == [public] * (1 if private else 3)
    assert kernel.private == [direct] * (2 if private else 0)
    assert kernel.warmups == 0


def test_a_prepared_launch_is_compiled_before_it_is_called(private: bool) -> None:
    kernel, tensor = FakeKernel(), torch.zeros(4)
    launch = KeyedLauncher(kernel)
    for _ in range(2):
        launch.prepare("key", (tensor, 5), {"SIZE": 16}, {"num_warps": 4})
    assert (kernel.warmups, kernel.public, kernel.private) == (1, [], [])
    launch("key", GRID, (tensor, 5), {"SIZE": 16}, {"num_warps": 4})
    public, direct = (GRID, (tensor, 5), {"SIZE": 16, "num_warps": 4}), (*BASE, tensor, 5, 16)
    assert (kernel.public, kernel.private) == (([], [direct]) if private else ([public], []))


def test_a_bound_launch_passes_addresses_where_it_may(private: bool) -> None:
    kernel, tensor = FakeKernel(), torch.zeros(4)
    bound = KeyedLauncher(kernel).bind("key", GRID, (tensor, 5), {"SIZE": 16}, {"num_warps": 4})
    assert (kernel.warmups, kernel.public, kernel.private) == (1, [], [])
    for _ in range(2):
        bound()
    public, direct = (GRID, (tensor, 5), {"SIZE": 16, "num_warps": 4}), (*BASE, tensor.data_ptr(), 5, 16)
    assert (kernel.public, kernel.private) == (([], [direct] * 2) if private else ([public] * 2, []))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3.6.0", None),
        ("3.8.0", None),
        ("3.9.1+git1a2b3c", None),
        ("3.5.1", "triton 3.5.1 is not one of the tested versions, 3.6 to 3.9"),
        ("3.10.0", "triton 3.10.0 is not one of the tested versions, 3.6 to 3.9"),
        ("4.6.0", "triton 4.6.0 is not one of the tested versions, 3.6 to 3.9"),
    ],
)
def test_the_interface_is_used_with_tested_versions_only(version: str, reason: str | None) -> None:
    assert untested_interface(version, CompiledKernel) == reason


def test_a_kernel_class_without_the_interface_is_noticed() -> None:
    assert untested_interface("3.8.0", SimpleNamespace) == "CompiledKernel of triton 3.8.0 has no property run"


def test_the_fallback_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    uses_private_interface.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    try:
        with caplog.at_level(logging.WARNING):
            assert [uses_private_interface() for _ in range(3)] == [False] * 3
    finally:
        uses_private_interface.cache_clear()
    (record,) = caplog.records
    assert "public interface" in record.getMessage()
    assert "triton 3.10.0" in record.getMessage()


def test_the_installed_triton_has_the_interface() -> None:
    """Of this version at least: the class has what is used, and its launcher takes what is passed, in this order."""
    assert untested_interface(triton.__version__, CompiledKernel) is None
    assert {"function", "packed_metadata"} <= set(CompiledKernel.__init__.__code__.co_names)
    names = list(inspect.signature(CudaLauncher.__call__).parameters)
    hooks = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    assert names[6:] in (["args"], [*hooks, "args"])  # 3.6; from 3.8 on
