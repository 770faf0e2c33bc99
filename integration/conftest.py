"""What all integration tests share: the built worker and the text front's client.

XLLM_WORKER names a built worker; without it, one is built with cmake into the repository's build-worker folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "integration" / "python"))


@pytest.fixture(scope="session")
def worker_path() -> Path:
    """The worker's executable; the probes lie beside it."""
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
