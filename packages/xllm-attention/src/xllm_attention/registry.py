"""Registry of attention backends: finds, loads and creates them by name, per phase or automatically.

Owns the table of built-in backends and the reading of the entry-point group `xllm.attention_backends`, whose values
name subclasses of `AttentionBackend`. A backend is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .backend import AttentionBackend, Phase
from .hybrid import HybridBackend
from .limits import BackendLimits
from .phased import PhasedBackend
from .selector import AUTO, auto_order, first_supported, parse_attention_backend
from .spec import AttentionSpec, LayerSpec

ENTRY_POINT_GROUP = "xllm.attention_backends"

_BUILT_IN = (
    EntryPoint("torch", "xllm_attention.backends.torch_backend:TorchBackend", ENTRY_POINT_GROUP),
    EntryPoint("triton", "xllm_attention.backends.triton_backend:TritonBackend", ENTRY_POINT_GROUP),
    EntryPoint("flashinfer", "xllm_attention.backends.flashinfer_backend:FlashInferBackend", ENTRY_POINT_GROUP),
)


def create_backend(
    name: str | Mapping[str, str],
    specs: Sequence[LayerSpec],
    limits: BackendLimits,
) -> AttentionBackend:
    """Makes the backend for a model's layers; the page size comes later, from `bind_kv_caches`.

    Args:
        name: one of `available_backends()`; or `"auto"`, the best of each phase by measurement; or one per phase, as
            `"decode=triton,prefill=flashinfer"` or a mapping (see `xllm_attention.selector.parse_attention_backend`).
        specs: one per layer; the index is the layer_id.
        limits: device, dtype and the largest step.

    Raises:
        ValueError: an unknown or unavailable name (lists what is available and why the others are not), or a spec that
            the backend cannot serve.
    """
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    backend = _attention_backend(name, attention, limits)
    return backend if len(attention) == len(specs) else HybridBackend(specs, limits, backend)


def _attention_backend(
    name: str | Mapping[str, str], specs: Sequence[AttentionSpec], limits: BackendLimits
) -> AttentionBackend:
    """The backend of the attention layers alone."""
    selected = parse_attention_backend(name)
    if isinstance(selected, str):
        if selected != AUTO:
            return _load(selected)(specs, limits)
        selected = dict.fromkeys(Phase, AUTO)
    for other in selected.values():
        if other != AUTO:
            _load(other)  # an unknown name is refused before `auto` looks at the others
    names = {phase: other for phase, other in selected.items() if other != AUTO}
    order = auto_order(limits.device.type)
    automatic = {phase: order[phase] for phase in Phase if phase not in names}
    candidates = dict.fromkeys(other for others in automatic.values() for other in others)
    refusals = {other: _refusal(other, specs, limits) for other in candidates}
    names |= {phase: first_supported(phase, others, refusals) for phase, others in automatic.items()}
    backends = {other: _load(other)(specs, limits) for other in dict.fromkeys(names.values())}
    if len(backends) == 1:
        return next(iter(backends.values()))
    label = name if isinstance(name, str) else ",".join(f"{phase}={other}" for phase, other in name.items())
    return PhasedBackend(label, {phase: backends[names[phase]] for phase in Phase}, specs, limits)


def available_backends() -> tuple[str, ...]:
    """Names of single backends that `create_backend` accepts in this environment, sorted."""
    return tuple(sorted(_load_all()[0]))


def unavailable_backends() -> dict[str, str]:
    """Names that are declared but cannot be used in this environment, each with the reason."""
    return _load_all()[1]


def _refusal(name: str, specs: Sequence[AttentionSpec], limits: BackendLimits) -> str | None:
    """Why a backend cannot serve these layers here; None when it can."""
    loaded = _load_point(_declared()[name])
    if isinstance(loaded, str):
        return loaded
    reasons = (loaded.capabilities.refusal(spec, limits) for spec in specs)
    return next((reason for reason in reasons if reason), None)


def _declared() -> dict[str, EntryPoint]:
    declared: dict[str, EntryPoint] = {}
    for point in (*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP)):
        if point.name in declared:
            raise ValueError(f"attention backend {point.name!r} is declared twice, the second time as {point.value}")
        declared[point.name] = point
    return declared


def _load(name: str) -> type[AttentionBackend]:
    point = _declared().get(name)
    if point is not None:
        backend = _load_point(point)
        if not isinstance(backend, str):
            return backend
    loaded, reasons = _load_all()
    others = "".join(f"; {other!r} is not: {reason}" for other, reason in reasons.items())
    raise ValueError(f"no attention backend {name!r}; available are {sorted(loaded)}{others}")


def _load_point(point: EntryPoint) -> type[AttentionBackend] | str:
    """The class, or why there is none."""
    try:
        backend: Any = point.load()
    # The last two: a library whose parts are of different versions, or whose shared objects cannot be opened.
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"{point.value} cannot be loaded: {error}"
    if isinstance(backend, type) and issubclass(backend, AttentionBackend):
        return backend
    return f"{point.value} is not a subclass of AttentionBackend"


def _load_all() -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    loaded: dict[str, type[AttentionBackend]] = {}
    reasons: dict[str, str] = {}
    for name, point in _declared().items():
        backend = _load_point(point)
        if isinstance(backend, str):
            reasons[name] = backend
        else:
            loaded[name] = backend
    return loaded, reasons
