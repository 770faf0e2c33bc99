"""Recorded graphs: capture and replay of dispatched ops, on a device without graphs of its own.

Mainly for tests: these graphs bake in, share and refuse what a device graph would.
"""

from .runtime import RecordedGraph, RecordedGraphRuntime

__all__ = ["RecordedGraph", "RecordedGraphRuntime"]
