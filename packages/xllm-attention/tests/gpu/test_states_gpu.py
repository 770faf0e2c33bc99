"""Gated DeltaNet on a CUDA device equals the formula on the CPU, also in a captured graph."""

from __future__ import annotations

import pytest
import torch

from xllm_attention import GatedDeltaNetSpec, StateStep
from xllm_metadata import LayerCache, allocate_caches

pytestmark = pytest.mark.gpu

NUM_SLOTS = 9
SPECS = {
    "qwen3-next": GatedDeltaNetSpec(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4),
    "odd": GatedDeltaNetSpec(num_k_heads=3, num_v_heads=9, head_k_dim=12, head_v_dim=40, conv_kernel_size=3),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def _inputs(spec: GatedDeltaNetSpec, dtype: torch.dtype, num_rows: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(num_rows)
    heads, channels = spec.num_v_heads, spec.num_channels
    shapes = ((num_rows, channels), (num_rows, heads), (num_rows, heads), (channels, spec.conv_kernel_size))
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in (*shapes, (heads,), (heads,)))


def _states(spec: GatedDeltaNetSpec, dtype: torch.dtype) -> LayerCache:
    (states,) = allocate_caches([spec.cache_specs(dtype)], num_pages=1, page_size=1, num_slots=NUM_SLOTS)
    random = torch.Generator().manual_seed(3)
    for _, tensor in states.items():
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return states


def _on(cache: LayerCache, device: str) -> LayerCache:
    return LayerCache(**{slot: tensor.clone().to(device) for slot, tensor in cache.items()})


def _step(read: tuple[int, ...], initial: tuple[bool, ...], bounds: tuple[int, ...] = ()) -> StateStep:
    slots = torch.tensor(read, dtype=torch.int32)
    return StateStep(
        decode=not bounds, read_slots=slots, write_slots=slots, has_initial=torch.tensor(initial), bounds=bounds
    )


def _to_device(step: StateStep) -> StateStep:
    return step._replace(
        read_slots=step.read_slots.cuda(),
        write_slots=step.write_slots.cuda(),
        has_initial=step.has_initial.cuda(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "step",
    [
        _step((4,), (True,)),
        _step((4, 0, -1, 8, 2), (True, False, False, True, True)),
        _step((4, 0, 3), (True, False, True), (0, 5, 140, 141)),
        _step((7, 1), (False, True), (0, 130, 130)),
    ],
    ids=["one", "decode", "chunks", "prompt"],
)
def test_the_device_equals_the_formula(step: StateStep, name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    num_rows = step.bounds[-1] if step.bounds else step.read_slots.shape[0]
    inputs, states = _inputs(spec, dtype, num_rows), _states(spec, dtype)
    expected_states, out = _on(states, "cpu"), torch.empty((num_rows, spec.num_v_heads, spec.head_v_dim), dtype=dtype)
    spec.run(step, expected_states, inputs, out)
    device_states = _on(states, "cuda")
    device_out = torch.full_like(out, torch.nan, device="cuda")
    spec.run(_to_device(step), device_states, tuple(tensor.cuda() for tensor in inputs), device_out)
    torch.testing.assert_close(device_out.cpu(), out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for (_, tensor), (_, expected) in zip(device_states.items(), expected_states.items(), strict=True):
        torch.testing.assert_close(tensor.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_captured_decode_step_reads_the_slots_of_each_replay() -> None:
    spec, dtype = SPECS["qwen3-next"], torch.bfloat16
    inputs = tuple(tensor.cuda() for tensor in _inputs(spec, dtype, 4))
    states = _states(spec, dtype)
    step = _to_device(_step((0, 1, 2, 3), (True,) * 4))
    out = torch.empty((4, spec.num_v_heads, spec.head_v_dim), dtype=dtype, device="cuda")
    cache = _on(states, "cuda")
    spec.run(step, _on(states, "cuda"), inputs, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spec.run(step, cache, inputs, out)
    for read, initial in (((5, 4, -1, -1), (True, False, False, False)), ((8, 7, 6, 5), (True,) * 4)):
        wanted_states, wanted = _on(cache, "cuda"), torch.empty_like(out)
        spec.run(_to_device(_step(read, initial)), wanted_states, inputs, wanted)
        for slots in (step.read_slots, step.write_slots):
            slots.copy_(torch.tensor(read))
        step.has_initial.copy_(torch.tensor(initial))
        graph.replay()
        assert torch.equal(out, wanted)
        for (_, tensor), (_, expected) in zip(cache.items(), wanted_states.items(), strict=True):
            assert torch.equal(tensor, expected)
