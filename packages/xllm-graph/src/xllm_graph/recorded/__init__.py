"""Recorded graphs: capture and replay of dispatched ops, on a device without graphs of its own.

For tests above all: what a device graph would bake in, share or refuse is baked in, shared or refused here too.
"""

from .runtime import RecordedGraph, RecordedGraphRuntime

__all__ = ["RecordedGraph", "RecordedGraphRuntime"]
