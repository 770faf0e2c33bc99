"""Defines the nox sessions: build, checks, tests and benchmarks. `python3 ci/nox.py` runs the default ones."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import IO

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

from environments import BELOW, PACKAGES, layered, package_dir, shared  # noqa: E402

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "tests", "graph", "integration", "parity"]
# ci/environments.py makes the environments: nox cannot put one environment on top of a shared one.
nox.options.default_venv_backend = "none"

ENVIRONMENTS = ROOT / ".nox"
WORKER_BUILD = ENVIRONMENTS / "worker-build"
TEXT_FRONT = ROOT / "integration" / "python"


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict and the import contracts."""
    python = shared(session)
    sources = os.pathsep.join(str(package_dir(package) / "src") for package in PACKAGES)
    run = _runner(session, python, PYTHONPATH=sources)
    run("-m", "ruff", "check", ".")
    run("-m", "ruff", "format", "--check", ".")
    run("-m", "mypy", *(f"packages/xllm-{package}/src" for package in PACKAGES), "integration/python")
    run(str(python.parent / "lint-imports"), "--no-cache")
    run("benchmarks/attention_table.py", "--check")


@nox.session
@nox.parametrize("package", [nox.param(package, id=package) for package in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, in an environment with only the packages below it. Arguments go to pytest.

    `-- --thorough` compares 50 random models per family instead of 10.
    """
    python = layered(session, ENVIRONMENTS / f"tests-{package}", (*BELOW[package], package), editable=True)
    run = _runner(session, python, XLLM_VALIDATE="1")
    # Only the tests of the models package define --thorough.
    arguments = [argument for argument in session.posargs if argument != "--thorough" or package == "models"]
    run("-m", "pytest", package_dir(package) / "tests", *arguments)


@nox.session
def graph(session: nox.Session) -> None:
    """Compares graphs with eager execution on real models, on the recorded runtime. Arguments go to pytest."""
    python = _all_packages(session)
    run = _runner(session, python, XLLM_VALIDATE="1")
    run("-m", "pytest", "integration/graph", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks on the GPU if there is one, else on the CPU; writes results, tables and plots to build/bench."""
    python = _all_packages(session)
    run = _runner(session, python)
    out = ROOT / "build" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    run("benchmarks/sweep.py", "--out", out / "sweep.json", *session.posargs)
    run("benchmarks/table.py", out / "sweep.json", "--out", out / "sweep.md", "--plot", out / "sweep.png")
    worker_python = _worker_environment(session)
    program = _build(session, worker_python, "integration/bridge", ENVIRONMENTS / "bridge-build", "step_benchmark")
    _runner(session, worker_python)("benchmarks/step.py", program, "--out", out / "step.json")
    run("-m", "pytest", "benchmarks/micro", "--benchmark-only", "--benchmark-json", out / "micro.json")


@nox.session
def tests_gpu(session: nox.Session) -> None:
    """Runs the tests that need a CUDA device. Arguments go to ci/gpu.sh."""
    _runner(session, shared(session))("ci/gpu.sh", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Tests bridge, worker and text front end to end. Arguments go to pytest."""
    python = _worker_environment(session)
    worker = _build_worker(session, python)
    run = _runner(session, python, PYTHONPATH=str(TEXT_FRONT), XLLM_WORKER=str(worker), XLLM_VALIDATE="1")
    run("-m", "pytest", *(session.posargs or ("integration/bridge/tests", "integration/tests")))


@nox.session
def parity(session: nox.Session) -> None:
    """Compares the native C++ model with the Python one, byte for byte, on 1 and 2 ranks. Arguments go to pytest."""
    python = _worker_environment(session)
    worker = _build_worker(session, python)
    run = _runner(session, python, PYTHONPATH=str(TEXT_FRONT), XLLM_WORKER=str(worker))
    run("-m", "pytest", *(session.posargs or ("integration/parity",)))


@nox.session
def demo(session: nox.Session) -> None:
    """Answers a prompt with a real model: `nox -s demo -- ["prompt"]`, `nox -s demo -- --model DIR "prompt"`.

    `-- --raw "text"` continues a text instead, without the model's chat template.
    """
    python = _worker_environment(session)
    worker = _build_worker(session, python)
    # The worker has the cores for itself: its OpenMP threads may spin, so that none must be woken for the next op.
    run = _runner(session, python, PYTHONPATH=str(TEXT_FRONT), OMP_WAIT_POLICY=None)
    arguments = list(session.posargs) or ["What is the capital of France?"]
    if not any(argument.split("=")[0] == "--model" for argument in arguments):
        model = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
        run("-m", "xllm_text", "fetch", "--out", model, stdout=sys.stderr)
        arguments = ["--model", str(model), *arguments]
    run("-m", "xllm_text", "--worker", worker, *arguments)


@nox.session
def build(session: nox.Session) -> None:
    """Builds wheels and sdists of all packages in dist/ and checks their metadata."""
    python = shared(session)
    run = _runner(session, python)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        run("-m", "build", "--no-isolation", "--outdir", dist, package_dir(package))
    run("-m", "twine", "check", "--strict", *sorted(dist.iterdir()))


def _worker_environment(session: nox.Session) -> Path:
    """Makes an environment with all packages installed from wheels, as in a deployment."""
    return layered(session, ENVIRONMENTS / "worker", PACKAGES, editable=False)


def _all_packages(session: nox.Session) -> Path:
    """Makes an environment with all packages in editable mode."""
    return layered(session, ENVIRONMENTS / "tests-executor", PACKAGES, editable=True)


def _build_worker(session: nox.Session, python: Path) -> Path:
    return _build(session, python, "integration/worker", WORKER_BUILD, "xllm_worker", everything=True)


def _build(
    session: nox.Session, python: Path, source: str, build: Path, target: str, *, everything: bool = False
) -> Path:
    """Builds a C++ project against the bridge, with the shared environment's cmake and ninja. Logs go to stderr."""
    tools = shared(session).parent
    cmake = str(tools / "cmake")
    cmake_dir = str(
        session.run(str(python), "-m", "xllm_executor", "--cmakedir", external=True, silent=True, log=False)
    ).strip()
    session.run(
        cmake, "-G", "Ninja", "-S", source, "-B", str(build),
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={python}", f"-Dxllm_executor_DIR={cmake_dir}",
        external=True, silent=True,
    )  # fmt: skip
    # Only a session's result goes to stdout, for example the answer of the demo.
    targets = [] if everything else ["--target", target]
    session.run(cmake, "--build", str(build), *targets, external=True, stdout=sys.stderr, stderr=sys.stderr)
    return build / target


class _Runner:
    """Runs commands in one environment. Its Python runs a command that begins with an option or a .py file."""

    def __init__(self, session: nox.Session, python: Path, environment: dict[str, str | None]) -> None:
        self._session = session
        self._python = python
        # Several processes share few cores: OpenMP threads that spin while they wait would slow the others down.
        self._environment = {"OMP_WAIT_POLICY": "PASSIVE", **environment}  # nox unsets a variable that is None

    def __call__(self, *command: object, stdout: IO[str] | None = None) -> None:
        parts = [str(part) for part in command]
        if parts[0].startswith("-") or parts[0].endswith(".py"):
            parts.insert(0, str(self._python))
        self._session.run(*parts, external=True, env=self._environment, stdout=stdout, stderr=sys.stderr)


def _runner(session: nox.Session, python: Path, **environment: str | None) -> _Runner:
    return _Runner(session, python, environment)
