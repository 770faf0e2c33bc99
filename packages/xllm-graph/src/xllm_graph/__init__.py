"""Runners: how one step of a model is executed.

Owns execution modes, persistent inputs and graph lifecycle. A runner is given two callables and an attention backend;
it knows nothing else of a model. Importing it touches no device.
"""

from .eager import EagerRunner
from .runner import EagerReason, Runner, StepStats

__all__ = ["EagerReason", "EagerRunner", "Runner", "StepStats"]
