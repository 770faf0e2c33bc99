"""Runners that execute one step of a model: eagerly, under device graphs, or compiled.

Owns execution modes, persistent inputs and the lifecycle of graphs. A runner gets two callables and an attention
backend, and needs nothing else of a model. Importing this package touches no device.
"""

from .buckets import parse_buckets, sequence_buckets, token_buckets
from .compiled import CompiledRunner, GraphPass, compiler_names
from .decode import DecodeGraphRunner
from .eager import EagerRunner
from .piecewise import PiecewiseGraphRunner
from .report import CaptureReport
from .runner import EagerReason, ModelCalls, Runner, StepStats
from .runner_set import CapturingRunner, Dispatch, RunnerSet
from .runtime import CaptureError, Graph, GraphRuntime, available_runtimes, create_runtime

__all__ = [
    "CaptureError",
    "CaptureReport",
    "CapturingRunner",
    "CompiledRunner",
    "DecodeGraphRunner",
    "Dispatch",
    "EagerReason",
    "EagerRunner",
    "Graph",
    "GraphPass",
    "GraphRuntime",
    "ModelCalls",
    "PiecewiseGraphRunner",
    "Runner",
    "RunnerSet",
    "StepStats",
    "available_runtimes",
    "compiler_names",
    "create_runtime",
    "parse_buckets",
    "sequence_buckets",
    "token_buckets",
]
