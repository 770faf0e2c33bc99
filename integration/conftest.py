"""Fixtures for all integration tests: the built worker and the SmolLM2 checkpoint. Extends sys.path for imports.

XLLM_WORKER names a built worker; without it, one is built with cmake into the repository's build-worker folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[1]
FRONT = REPO / "integration" / "python"
sys.path.insert(0, str(FRONT))
sys.path.insert(0, str(Path(__file__).parent / "support"))

# A child inherits ignored signals, as nohup and a shell's background jobs have them. The tests send these signals.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

GPU_ASKED_FOR = os.environ.get("XLLM_GPU_TESTS") == "1"
SEVERAL_ASKED_FOR = GPU_ASKED_FOR and os.environ.get("XLLM_NUM_GPUS", "1") != "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects gpu tests unless XLLM_GPU_TESTS=1, and multi_gpu tests unless also XLLM_NUM_GPUS is more than 1."""
    unwanted = {name for name, wanted in (("gpu", GPU_ASKED_FOR), ("multi_gpu", SEVERAL_ASKED_FOR)) if not wanted}
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails a GPU test on a machine without enough GPUs, instead of skipping it."""
    needed = 2 if item.get_closest_marker("multi_gpu") else int(item.get_closest_marker("gpu") is not None)
    if torch.cuda.device_count() < needed:
        pytest.fail(f"this test needs {needed} CUDA devices; torch finds {torch.cuda.device_count()}")


@pytest.fixture(scope="session")
def worker_path() -> Path:
    """The worker's executable. The probes are in the same folder."""
    if given := os.environ.get("XLLM_WORKER"):
        return Path(given)
    build = REPO / "build-worker"
    source = REPO / "integration" / "worker"
    configure = ["cmake", "-S", str(source), "-B", str(build), f"-DPython_EXECUTABLE={sys.executable}"]
    scripts = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(configure, check=True, env=env)
    subprocess.run(["cmake", "--build", str(build), "--parallel", "2"], check=True, env=env)
    return build / "xllm_worker"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2 checkpoint from the fetch command."""
    env = {**os.environ, "PYTHONPATH": str(FRONT)}
    command = [sys.executable, "-m", "xllm_text", "fetch"]
    result = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True)
    return Path(result.stdout.strip())
