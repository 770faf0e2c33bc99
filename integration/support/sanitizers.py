"""Compiler flags and options of sanitizers, for all tests that run programs under them."""

from __future__ import annotations

import shutil
import subprocess

ADDRESS_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O0"
THREAD_FLAGS = "-fsanitize=thread -g1 -O0"

TSAN_EXIT_CODE = 66
TSAN_OPTIONS = ":".join(
    (
        # What libraries do through libc is ordered in ways that cannot all be seen, and not ours; their locks count.
        "ignore_noninstrumented_modules=1",
        "atexit_sleep_ms=0",
        f"exitcode={TSAN_EXIT_CODE}",
    )
)


def without_randomized_addresses() -> list[str]:
    """A prefix of commands, where the system lets it: older thread sanitizers stop at some kernels' address layouts."""
    setarch = shutil.which("setarch")
    if setarch is None or subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode != 0:
        return []
    return [setarch, "-R"]
