"""The conformance suite: what every attention backend must do, as data and checks. Needs no test framework.

    from xllm_attention.conformance import CASES, run_case

    for case in CASES:
        result = run_case(MyBackend, case, device="cuda")

`run_case` raises `ConformanceError` at the first deviation. It reports a combination that the backend refuses to serve
as `result.refused`; a backend's own tests should assert which those are. Random batches come from
`xllm_attention.conformance.strategies`, which needs hypothesis.
"""

from .case import EMPTY, CacheLayout, Case
from .cases import CASES
from .large import check_large_cache
from .reference import reference_attention
from .runner import BackendFactory, CaseResult, ConformanceError, run_case

__all__ = [
    "CASES",
    "EMPTY",
    "BackendFactory",
    "CacheLayout",
    "Case",
    "CaseResult",
    "ConformanceError",
    "check_large_cache",
    "reference_attention",
    "run_case",
]
