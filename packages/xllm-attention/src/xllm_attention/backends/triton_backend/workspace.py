"""Persistent buffers of the kernels: work lists, page indices, partial results. One set for all buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
import triton

from ...backend import Phase, Step
from ...kv_groups import pages_of, slots_of
from ...spec import AttentionSpec
from ...triton_launch import KeyedLauncher
from .tiles import Heads, Tiles, decode_tiles, interpreted_tiles, prefill_tiles
from .worklist import ITEM_WIDTH, worklist_kernel

BLOCK_I = 32  # items per program of the work list's kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Grid and arguments of the work list's kernel for one step size."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """The work list of one attention group, for decode or for other steps, and its size for a bucket."""

    spec: AttentionSpec
    kv_group: int  # KV cache group of the layers, whose page table the list refers to
    tiles: Tiles
    decode: bool
    max_num_seqs: int
    num_processors: int
    heads: Heads
    items: torch.Tensor  # [capacity, ITEM_WIDTH] int32
    launch: KeyedLauncher
    decode_launches: dict[int, _Launch] = field(default_factory=dict)  # by sequences
    # By sequences, for graphs' steps: the last one's addresses, and the launch that reads there.
    graph_launches: dict[int, tuple[tuple[int, ...], Callable[[], None]]] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        spec: AttentionSpec,
        *,
        kv_group: int = 0,
        dtype: torch.dtype,
        decode: bool,
        max_num_seqs: int,
        max_num_tokens: int,
        num_processors: int,
        interpreted: bool,
        device: torch.device,
    ) -> WorkList:
        """A list that is large enough for every bucket."""
        tiles = decode_tiles(spec, dtype) if decode else prefill_tiles(spec, dtype)
        if interpreted:
            tiles = interpreted_tiles(tiles, decode=decode)
        empty = torch.empty(0, dtype=torch.int32, device=device)
        launch = KeyedLauncher(worklist_kernel)
        sizes = cls(
            spec=spec, kv_group=kv_group, tiles=tiles, decode=decode, max_num_seqs=max_num_seqs,
            num_processors=num_processors, heads=Heads.of(spec), items=empty, launch=launch,
        )  # fmt: skip
        capacity = sizes.num_items(max_num_tokens, max_num_seqs)
        items = torch.zeros((capacity, ITEM_WIDTH.value), dtype=torch.int32, device=device)
        return replace(sizes, items=items)

    def wave(self) -> int:
        """Items that fill the device once."""
        return max(1, self.tiles.wave_programs * self.num_processors // self.heads.num_blocks)

    def target(self, num_seqs: int) -> int:
        """Items that a step may have because its keys are cut into chunks."""
        if not self.decode:
            return self.wave()
        return num_seqs + self._max_programs(num_seqs)

    def num_items(self, num_tokens: int, num_seqs: int) -> int:
        """Items that a step of this bucket has at most, and so the launch's size."""
        if self.decode:
            return self.target(num_seqs)
        num_tiles = -(-num_tokens * self.heads.block_heads // self.tiles.block_m) + num_seqs
        return max(num_tiles, self.target(num_seqs))

    def num_programs(self, num_tokens: int, num_seqs: int) -> int:
        """Programs of a launch for each block of heads."""
        return self._max_programs(num_seqs) if self.decode else self.num_items(num_tokens, num_seqs)

    def _max_programs(self, num_seqs: int) -> int:
        # Programs without work cost time too, so there are no more waves than sequences.
        return self.wave() * min(self.tiles.max_waves, num_seqs)

    def num_partials(self, num_seqs: int) -> int:
        """Items that may be chunks of a tile: a step has chunks only while it stays within the target."""
        return self.target(num_seqs)

    def fill(self, step: Step, pages: torch.Tensor, *, copies_pages: bool) -> None:
        """Makes the list of a step, on the device and without waiting for it; also copies its page indices.

        Args:
            step: the step.
            pages: target of the page indices of the list's KV cache group.
            copies_pages: False if another list of the step copies them.
        """
        metadata = step.metadata
        qo_indptr = metadata.kv_cu_seq_lens if self.decode else metadata.qo_indptr
        assert qo_indptr is not None  # `plan` has checked it
        inputs = (
            metadata.kv_cu_seq_lens,
            qo_indptr,
            metadata.paged_kv_indptr,
            slots_of(metadata, self.kv_group),
            pages_of(metadata, self.kv_group),
        )
        addresses: tuple[int, ...] = ()
        if step.graph:
            # Graphs plan from persistent buffers, so an equal launch can be repeated.
            addresses = tuple([tensor.data_ptr() for tensor in inputs])
            before = self.graph_launches.get(step.num_seqs)
            if before is not None and before[0] == addresses:
                before[1]()
                return
        known = self.decode_launches.get(step.num_seqs) if self.decode else None
        if known is None:
            known = self._launch_of(step.num_tokens, step.num_seqs)
            if self.decode:  # other steps come in too many sizes to keep them
                self.decode_launches[step.num_seqs] = known
        arguments = (*inputs, pages, self.items, pages.shape[0] if copies_pages else 0, *known.numbers)
        call = (known.constants["BLOCK_B"], known.grid, arguments, known.constants, {"num_warps": 4})
        if step.graph:
            launch = self.launch.bind(*call)
            self.graph_launches[step.num_seqs] = addresses, launch
            launch()
        else:
            self.launch(*call)

    def _launch_of(self, num_tokens: int, num_seqs: int) -> _Launch:
        num_items, tiles = self.num_items(num_tokens, num_seqs), self.tiles
        return _Launch(
            grid=(triton.cdiv(num_items, BLOCK_I), 1, 1),
            numbers=(num_seqs, num_items, self.target(num_seqs), self.wave()),
            constants={
                "G": self.heads.block_heads,
                "WINDOW": self.spec.sliding_window,
                "DECODE": self.decode,
                "BLOCK_M": tiles.block_m,
                "UNIT": tiles.block_n,
                "LEAST_UNITS": tiles.least_units,
                "ENOUGH_UNITS": tiles.enough_units,
                # Decode sizes are buckets, compiled during warm-up. Other sizes are arbitrary: one block size for all.
                "BLOCK_B": max(32, triton.next_power_of_2(num_seqs if self.decode else self.max_num_seqs)),
                "BLOCK_I": BLOCK_I,
            },
        )


class Workspace:
    """Scratch buffers that all groups share. Launches are ordered on the stream, so one uses them at a time."""

    def __init__(
        self, lists: tuple[WorkList, ...], *, max_num_seqs: int, max_num_tokens: int, max_num_pages: int,
        device: torch.device, kv_groups: Collection[int],
    ) -> None:  # fmt: skip
        partials, states, arrivals = 1, 1, 1
        for work in lists:
            rows = work.num_partials(max_num_seqs) * work.heads.num_blocks * work.tiles.kept_rows
            partials = max(partials, rows * triton.next_power_of_2(work.heads.dim))
            states = max(states, 2 * rows)
            arrivals = max(arrivals, work.num_partials(max_num_seqs) * work.heads.num_blocks)
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.states = torch.empty(states, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self.firsts = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # By KV cache group.
        self.pages = {
            kv_group: torch.zeros(max(1, max_num_pages), dtype=torch.int32, device=device) for kv_group in kv_groups
        }
        self._max_num_pages = max(1, max_num_pages)
        self._slots = {
            kv_group: torch.zeros(max_num_tokens, dtype=torch.int32, device=device) for kv_group in kv_groups
        }
        self.slots = {kv_group: slots[:0] for kv_group, slots in self._slots.items()}

    def fill(self, step: Step) -> None:
        """Copies the slots of a step that is not decode, on the device and without waiting for it.

        Raises:
            ValueError: more page indices than the first work list can copy. Not checked for a graph's
                step: its host mirrors may be filled after the plan.
        """
        metadata = step.metadata
        num_pages = 0 if step.graph else int(metadata.paged_kv_indptr_host.numpy()[-1])  # host memory
        if num_pages > self._max_num_pages:
            raise ValueError(
                f"the step has {num_pages} pages; sequences of max_model_len need {self._max_num_pages} at most"
            )
        if step.phase is not Phase.DECODE:
            for kv_group, buffer in self._slots.items():
                self.slots[kv_group] = buffer[: step.num_tokens]
                self.slots[kv_group].copy_(slots_of(metadata, kv_group))
