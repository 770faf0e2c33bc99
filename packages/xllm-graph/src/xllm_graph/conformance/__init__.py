"""Conformance suite: compares graph execution with eager execution, for any runner, runtime, model and backend.

Owns the requests, the poison, the comparison and the scenarios. Imports no test framework: a test makes a
`ReplayHarness` and calls a scenario with it. A `ConformanceError` names the check that failed.
"""

from .comparison import Check, ConformanceError
from .harness import Execute, Limits, ReplayHarness
from .scenarios import SCENARIOS, Scenario
from .workload import MixedWorkload

__all__ = ["SCENARIOS", "Check", "ConformanceError", "Execute", "Limits", "MixedWorkload", "ReplayHarness", "Scenario"]
