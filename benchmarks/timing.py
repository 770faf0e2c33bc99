"""Device and host times of one call, and the read bandwidth, for the benchmarks on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def device_us(launch: Callable[[], object], repeats: int) -> float:
    """Median device time of one call."""
    launch()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def host_us(call: Callable[[], object], repeats: int = 50) -> float:
    """Median host time of one call; the device is idle before each."""
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[5:])


def read_bandwidth() -> float:
    """TB/s of summing 4 GB."""
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return data.nbytes / device_us(data.sum, 20) / 1e6
