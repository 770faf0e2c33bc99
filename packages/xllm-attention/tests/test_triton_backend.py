"""The triton backend's kernels in Triton's interpreter, and compiled for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from xllm_attention import AttentionSpec, BackendLimits, create_backend
from xllm_attention.conformance import CASES, BackendFactory, Case, check_large_cache, run_case
from xllm_attention.conformance.strategies import cases
from xllm_attention.triton_launch import KeyedLauncher
from xllm_metadata import LayerCache, StaticAttentionMetadata, build_attention_metadata

FACTORY: BackendFactory = partial(create_backend, "triton")
LIMITS = BackendLimits(
    device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=8, max_num_tokens=64, max_model_len=64
)

# The interpreter takes a second where a GPU takes microseconds: one case of every kind here, the whole table on a GPU.
TABLE = """
decode decode-group5 decode-group12 decode-dim80 decode-dim256 decode-page1 decode-window2 decode-window16
decode-cap decode-fp16 decode-heads_first prefill prefill-window17 prefill-cap-window5 prefill-kv_interleaved mixed
mixed-group3 mixed-window15 mixed-cap mixed-fp16 mixed-garbage mixed-page1-window2 order-interleaved empty-step
empty-step-padded empty-queries empty-first empty-middle empty-last empty-prefill empty-decode-rows
empty-decode-rows-page1 padded-mixed padded-prefill extra-rows graph-decode bad-prefill bad-prefill-v-infinite
bad-prefill-window bad-chunk bad-chunk-v-window bad-chunk-cap
decode-kvgroups3 prefill-kvgroups-windows mixed-kvgroups mixed-kvgroups-sinks mixed-kvgroups-page1
decode-kvgroups-infinite graph-decode-kvgroups padded-mixed-kvgroups padded-empty-kvgroups
decode-sinks decode-sinks-windows-group5 decode-sinks-fp16-dim80 prefill-sinks-cap-window5 mixed-sinks
mixed-sinks-windows-group5 empty-decode-rows-sinks graph-decode-sinks-windows bad-chunk-sinks
bad-prefill-latent bad-prefill-v-latent bad-chunk-v-latent decode-latent mixed-latent decode-latent576-group16
mixed-latent576-fp16 prefill-latent-all mixed-latent-heads_first graph-decode-latent long-decode-latent
decode-fp8 prefill-fp8 mixed-fp8 mixed-fp8-fp16-dim128 decode-fp8-dim80-group3 decode-fp8-all mixed-fp8-all
prefill-fp8-page1 mixed-fp8-heads_first graph-decode-fp8 bad-prefill-fp8 bad-chunk-infinite-fp8 bad-chunk-v-fp8
"""
BY_NAME = {case.name: case for case in CASES}
SMALLER = (
    # Keys of one sequence in several chunks, rows in several tiles, both around their edges.
    Case(name="long-decode", prefix_lens=(300, 1, 130), steps=(((0, 1), (1, 1), (2, 1)),) * 2, windows=(0, 200)),
    Case(name="long-chunk", prefix_lens=(100, 3), steps=(((0, 40), (1, 1)),), windows=(0, 50), num_heads=2),
    Case(
        name="long-decode-sinks",
        prefix_lens=(300, 1, 130),
        steps=(((0, 1), (1, 1), (2, 1)),) * 2,
        windows=(0, 200),
        sinks=True,
    ),
    Case(name="long-chunk-sinks", prefix_lens=(100, 3), steps=(((0, 40), (1, 1)),), windows=(0, 50), sinks=True),
    # 128 query heads over one latent key: two blocks of 64.
    Case(
        name="blocks-latent",
        prefix_lens=(70, 3),
        steps=(((0, 1), (1, 1)), ((0, 3), (1, 4)), ((1, 1),)),
        latent=True,
        num_heads=128,
        num_kv_heads=1,
        head_dim=96,
        v_head_dim=64,
        soft_cap=2.0,
        sinks=True,
    ),
    Case(
        name="kv-heads-latent",
        prefix_lens=(70, 0, 3),
        steps=(((0, 3), (1, 4), (2, 1)), ((0, 1), (2, 1))),
        latent=True,
        num_heads=160,
        num_kv_heads=2,
        head_dim=24,
        v_head_dim=16,
        windows=(0, 9),
    ),
    Case(name="few-tokens-sinks", prefix_lens=(200, 90, 3), steps=(((0, 4), (1, 4), (2, 3)),), sinks=True),
    Case(name="few-tokens", prefix_lens=(200, 90, 3), steps=(((0, 4), (1, 4), (2, 3)),), windows=(0, 33)),
    Case(name="short-prompts", prefix_lens=(0, 0), steps=(((0, 3), (1, 5)), ((0, 1), (1, 1)))),
    Case(
        name="graph",
        prefix_lens=(1, 40, 16),
        steps=(((0, 1), (1, 1), (2, 1)), ((2, 1),)),
        bucket=4,
        graph=True,
        windows=(0, 7),
        page_size=1,
    ),
)  # fmt: skip


# numpy, which the interpreter runs on, warns about bad tokens.
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("name", TABLE.split())
def test_table(name: str) -> None:
    assert run_case(FACTORY, BY_NAME[name]).refused is None


@pytest.mark.parametrize("case", SMALLER, ids=lambda case: case.name)
def test_long_and_few(case: Case) -> None:
    assert run_case(FACTORY, case).refused is None


@given(case=cases(dtypes=(torch.float32, torch.float16), fp8=True, kv_groups=True))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_batches(case: Case) -> None:
    assert run_case(FACTORY, case).refused is None


def test_offsets_beyond_int32() -> None:
    check_large_cache(FACTORY, dtype=torch.float16)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (torch.bfloat16, 64, "'triton' cannot serve torch.bfloat16 in its interpreter"),
        (torch.float64, 64, "'triton' cannot serve layer 0: dtype torch.float64; served are"),
        (torch.float32, 72, "'triton' cannot serve layer 0: head_dim 72; served are"),
    ],
)
def test_what_it_refuses(dtype: torch.dtype, head_dim: int, message: str) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=head_dim, scale=1.0)
    with pytest.raises(ValueError, match=message):
        create_backend("triton", [spec], replace(LIMITS, dtype=dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"latent": True, "v_head_dim": 576},
            r"'triton' cannot serve layer 0: latent head_dim and v_head_dim \(576, 576\); served are",
        ),
        ({"v_head_dim": 128}, "'triton' cannot serve layer 0: v_head_dim 128; served is that of the keys, 576"),
    ],
)
def test_it_refuses_other_value_sizes_by_name(change: dict[str, Any], message: str) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=576, scale=1.0)
    with pytest.raises(ValueError, match=message):
        create_backend("triton", [replace(spec, **change)], LIMITS)


def test_a_cpu_without_the_interpreter() -> None:
    code = """
import torch
from xllm_attention import AttentionSpec, BackendLimits, create_backend
spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, scale=1.0)
limits = BackendLimits(device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=1, max_num_tokens=1,
                       max_model_len=1)
try:
    create_backend("triton", [spec], limits)
except ValueError as error:
    assert "set TRITON_INTERPRET=1" in str(error), error
else:
    raise AssertionError("not refused")
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "0"}, check=True)


def test_launches_depend_on_the_bucket_and_not_on_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same kernels, grids, constants and addresses for every batch in a bucket: so a captured graph serves them all."""
    seen: list[list[Any]] = []
    original, bind = KeyedLauncher.__call__, KeyedLauncher.bind

    def record(self: KeyedLauncher, key: Any, grid: Any, arguments: Any, constants: Any) -> None:
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        seen[-1].append((self._kernel, key, grid, values, constants))

    def call(self: KeyedLauncher, key: Any, grid: Any, arguments: Any, constants: Any, options: Any) -> None:
        record(self, key, grid, arguments, constants)
        original(self, key, grid, arguments, constants, options)

    def bind_recorded(self: KeyedLauncher, key: Any, grid: Any, arguments: Any, *rest: Any) -> Callable[[], None]:
        launch = bind(self, key, grid, arguments, *rest)

        def call_bound() -> None:
            record(self, key, grid, arguments, rest[0])
            launch()

        return call_bound

    monkeypatch.setattr(KeyedLauncher, "__call__", call)
    monkeypatch.setattr(KeyedLauncher, "bind", bind_recorded)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    specs = [spec, replace(spec, sliding_window=5)]
    backend = create_backend("triton", specs, LIMITS)
    backend.bind_kv_caches([LayerCache.from_tensors(tuple(torch.randn(2, 32, 4, 2, 16))) for _ in specs])
    static = StaticAttentionMetadata(max_num_tokens=4, max_num_seqs=4, max_num_pages=32, device="cpu")
    tables = [list(range(8 * seq, 8 * seq + 8)) for seq in range(4)]
    q, k, out = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.empty(4, 4, 16)
    for lens in ([1], [30, 1, 17, 4], [], [2, 2, 31]):
        seen.append([])
        live = build_attention_metadata([1] * len(lens), lens, tables[: len(lens)], 4)
        static.fill(live, num_tokens=4, num_seqs=4)
        backend.plan(static, graph=True)
        for layer_id in range(2):
            backend.run(q, k, k, out, layer_id)
    assert len(seen[0]) == 4  # two work lists, two launches: decode appends by itself
    assert all(launches == seen[0] for launches in seen)


def test_padding_changes_no_bit() -> None:
    """Sums are taken in the same order whatever a step is padded to: eager steps and graphs agree to the bit."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    backend = create_backend("triton", [spec], replace(LIMITS, max_num_seqs=16))
    backend.bind_kv_caches([LayerCache.from_tensors(tuple(torch.randn(2, 32, 4, 2, 16)))])
    static = StaticAttentionMetadata(max_num_tokens=16, max_num_seqs=16, max_num_pages=64, device="cpu")
    live = build_attention_metadata([1] * 3, [61, 40, 33], [list(range(8 * seq, 8 * seq + 16)) for seq in range(3)], 4)
    q, k = torch.randn(16, 4, 16), torch.randn(16, 2, 16)
    outputs = []
    for size in (3, 4, 16):
        static.fill(live, num_tokens=size, num_seqs=size)
        backend.plan(static, graph=True)
        outputs.append(torch.full((size, 4, 16), torch.nan))
        backend.run(q[:size], k[:size], k[:size], outputs[-1], 0)
        assert not outputs[-1][3:].any()
    assert all(torch.equal(out[:3], outputs[0]) for out in outputs)


COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from xllm_attention import AttentionSpec
from xllm_attention.backends.triton_backend.append import append_kernel
from xllm_attention.backends.triton_backend.attend import attend_kernel
from xllm_attention.backends.triton_backend.combine import combine_kernel
from xllm_attention.backends.triton_backend.tiles import Heads, decode_tiles, prefill_tiles
from xllm_attention.backends.triton_backend.worklist import ITEM_WIDTH, worklist_kernel

def build(kernel, types, constants, options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 * 1024, (kernel.__name__, constants, compiled.metadata.shared)
    before, wait, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    assert bool(wait) == constants.get("PDL", False)
    # The item is read before the wait, and no more.
    assert not wait or before.count("ld.global") <= ITEM_WIDTH.value, before.count("ld.global")

kind, dtype, head_dim, group, window, cap, paged, sinks, v_dim = eval(sys.argv[1])
spec = AttentionSpec(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, scale=0.1, sliding_window=window,
                     logits_soft_cap=cap, sinks=sinks, v_head_dim=v_dim, latent=v_dim > 0)
heads = Heads.of(spec)
dtype, _, cache_dtype = dtype.partition("-")
cached = "*" + (cache_dtype or dtype)
scales = ("k_scale", "v_scale")
scale_types = dict.fromkeys(scales, "fp32") if cache_dtype else {}
no_scales = {} if cache_dtype else dict.fromkeys(scales)
torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
decode = kind == "decode"
tiles = (decode_tiles if decode else prefill_tiles)(spec, torch_dtype)
cache = (32 * head_dim, 2 * head_dim, head_dim, 1)
caches = {"K_CACHE_STRIDES": cache, "V_CACHE_STRIDES": cache}
rows = ((2 * group + 4) * head_dim, head_dim, 1)
d_pad = triton.next_power_of_2(heads.dim)
data = {"k_ptr": "*" + dtype, "v_ptr": "*" + dtype, "k_cache_ptr": cached, "v_cache_ptr": cached, **scale_types}
build(append_kernel, {**data, "slots_ptr": "*i32"},
      {**no_scales, "K_STRIDES": rows, "V_STRIDES": rows, **caches, "PAGE_SIZE": 16, "K": 2, "D": head_dim, "K_PAD": 2,
       "D_PAD": triton.next_power_of_2(head_dim), "V_DIM": v_dim}, {})
pointers = ("kv_indptr_ptr", "qo_indptr_ptr", "table_indptr_ptr", "slots_ptr", "pages_ptr", "kept_ptr", "items_ptr")
build(worklist_kernel, {name: "*i32" for name in pointers},
      {"G": heads.block_heads, "WINDOW": window, "DECODE": decode, "BLOCK_M": tiles.block_m, "UNIT": tiles.block_n,
       "LEAST_UNITS": tiles.least_units, "ENOUGH_UNITS": tiles.enough_units, "BLOCK_B": 128, "BLOCK_I": 32}, {})
data = {name: "*" + dtype for name in ("q_ptr", "k_new_ptr", "v_new_ptr", "out_ptr", "k_cache_ptr", "v_cache_ptr",
                                        "sinks_ptr")}
data |= {"k_cache_ptr": cached, "v_cache_ptr": cached, **scale_types}
data |= {"items_ptr": "*i32", "pages_ptr": "*i32", "arrived_ptr": "*i32", "partial_ptr": "*fp32", "state_ptr": "*fp32"}
build(attend_kernel, data,
      {**no_scales, "Q_STRIDES": rows, "K_NEW_STRIDES": rows, "V_NEW_STRIDES": rows,
       "OUT_STRIDES": (2 * group * head_dim, head_dim, 1), **caches, "scale": 0.1, "soft_cap": cap,
       "G": heads.block_heads, "K": heads.num_blocks, "D": heads.dim, "D_PAD": d_pad, "PAGE_SIZE": 16,
       "WINDOW": window, "CAP": cap > 0, "SINKS": sinks, "REST": heads.rest_dim, "REST_PAD": max(16, heads.rest_dim),
       "BLOCKS": heads.sharers,
       "DECODE": decode, "PAGED": paged, "IEEE": dtype == "fp32", "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
       "R": tiles.kept_rows, "BLOCK_C": tiles.block_c, "PDL": decode},
      {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.max_registers,
       "launch_pdl": decode})
if spec.latent:
    data = {"out_ptr": "*" + dtype, "items_ptr": "*i32", "firsts_ptr": "*i32", "partial_ptr": "*fp32",
            "state_ptr": "*fp32"}
    build(combine_kernel, data,
          {"OUT_STRIDES": (2 * group * v_dim, v_dim, 1), "G": heads.block_heads, "K": heads.num_blocks, "D": heads.dim,
           "D_PAD": d_pad, "DECODE": decode, "BLOCK_M": tiles.block_m, "R": tiles.kept_rows, "ROWS": 2,
           "BLOCK_C": tiles.block_c, "PDL": decode}, {"num_warps": 4, "launch_pdl": decode})
"""


@pytest.mark.parametrize(
    "variant",
    [
        ("decode", "bf16", 128, 2, 0, 0.0, True, False, 0),
        ("decode", "fp16", 80, 12, 7, 1.5, True, False, 0),
        ("decode", "fp32", 32, 3, 0, 0.0, True, False, 0),
        ("decode", "bf16", 64, 8, 128, 0.0, True, True, 0),
        ("decode", "bf16", 576, 128, 0, 0.0, True, False, 512),
        ("decode", "bf16", 576, 16, 0, 0.0, True, False, 512),
        ("decode", "fp32", 576, 16, 0, 0.0, True, False, 512),
        ("decode", "bf16-fp8e4nv", 128, 2, 0, 0.0, True, False, 0),
        ("decode", "fp32-fp8e4nv", 64, 8, 7, 1.5, True, True, 0),
        ("many", "bf16-fp8e4nv", 128, 2, 0, 0.0, True, False, 0),
        ("many", "fp16-fp8e4nv", 64, 8, 128, 1.5, True, True, 0),
        ("many", "bf16", 256, 4, 0, 0.0, True, False, 0),
        ("many", "bf16", 128, 2, 0, 0.0, False, False, 0),
        ("many", "fp16", 96, 3, 7, 1.5, True, False, 0),
        ("many", "bf16", 64, 8, 128, 0.0, True, True, 0),
        ("many", "bf16", 576, 128, 0, 0.0, True, False, 512),
        ("many", "fp32", 576, 16, 0, 0.0, False, False, 512),
    ],
    ids=lambda variant: "-".join(map(str, variant)),
)
def test_kernels_compile_for_a_gpu(variant: tuple[Any, ...]) -> None:
    """The interpreter accepts what the compiler refuses. In a process of its own: here the kernels are interpreted."""
    subprocess.run(
        [sys.executable, "-c", COMPILE, repr(variant)], env={**os.environ, "TRITON_INTERPRET": "0"}, check=True
    )
