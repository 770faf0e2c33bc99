"""The launcher of compiled kernels, over a driver that records what it is asked to load and to launch."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
from types import SimpleNamespace
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from xllm_attention.backends.triton_backend.launch import Launcher
from xllm_attention.backends.triton_backend.append import append_kernel

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
for call in launched:
    assert all(ours is theirs for ours, theirs in zip(call[9:14], arguments)), call
    assert call[14:] == tuple(constants.values()), call
"""


def test_what_is_prepared_is_loaded_once_and_launched_when_called() -> None:
    """In a process of its own: here the kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
