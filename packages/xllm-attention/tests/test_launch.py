"""The launcher of compiled kernels, over a driver that records what it is asked to load and to launch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
from xllm_attention.backends.triton_backend.launch import Launcher

k = torch.zeros(4, 2, 16)
cache, slots = torch.zeros(8, 4, 2, 16), torch.zeros(4, dtype=torch.int32)
arguments = (k, k, cache, cache, slots)
constants = {"STRIDES": (*k.stride(), *k.stride(), *cache.stride(), *cache.stride()), "PAGE_SIZE": 4, "K": 2, "D": 16,
             "K_PAD": 2, "D_PAD": 16}
options = {"num_warps": 4, "maxnreg": None, "launch_pdl": True}
launch = Launcher(append_kernel)
launch.prepare("one", arguments, constants, options)
assert (len(loaded), launched) == (1, []), (loaded, launched)
launch.prepare("one", arguments, constants, options)
launch("one", (4, 1, 1), arguments, constants, options)
launch("other", (2, 1, 1), arguments, constants, {**options, "num_warps": 2})
launch("other", (3, 1, 1), arguments, constants, {**options, "num_warps": 2})
assert len(loaded) == 2, loaded
assert [call[:5] for call in launched] == [(grid, 1, 1, 7, "function") for grid in (4, 2, 3)], launched
launch.bound("one", (5, 1, 1), arguments, constants)()
bound = launched.pop()
assert bound[:5] == (5, 1, 1, 7, "function"), bound
assert bound[9:14] == tuple(tensor.data_ptr() for tensor in arguments), bound
assert bound[14:] == tuple(constants.values()), bound
for call in launched:
    assert all(ours is theirs for ours, theirs in zip(call[9:14], arguments)), call
    assert call[14:] == tuple(constants.values()), call
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
backend.bind_kv_caches([LayerCache.from_tensors(tuple(torch.zeros(2, 32, 4, 2, 16, dtype=torch.float16)))] * 2)
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
