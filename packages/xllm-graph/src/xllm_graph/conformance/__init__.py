"""A suite that holds graph execution to eager execution: every runner, any runtime, any model and backend.

Owns the requests, the poison, the comparison and the scenarios. Imports no test framework: a test calls `check` with a
scenario and a way to make a `ReplayHarness`, and gets a `ConformanceError` that says what differs.
"""

from .comparison import Check, ConformanceError
from .harness import Execute, Limits, ReplayHarness
from .scenarios import SCENARIOS, Scenario
from .workload import MixedWorkload

__all__ = ["SCENARIOS", "Check", "ConformanceError", "Execute", "Limits", "MixedWorkload", "ReplayHarness", "Scenario"]
