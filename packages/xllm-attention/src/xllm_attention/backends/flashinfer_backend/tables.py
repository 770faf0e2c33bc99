"""Device copies of a step's index arrays, at addresses that never change. Owns the buffers, shared by all groups."""

from __future__ import annotations

import torch

from ...backend import Phase, Step


class StepTables:
    """Buffers for the index arrays of one step. B sequences, P pages, T tokens.

    They are copied on the device, from the metadata's device tensors, so that nothing of a step is read from host
    memory after `plan` has returned.
    """

    def __init__(self, *, max_num_seqs: int, max_num_tokens: int, max_num_pages: int, device: torch.device) -> None:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.kv_indptr = buffer(max_num_seqs + 1)  # into `pages`
        self.pages = buffer(max_num_pages)
        self.last_page_lens = buffer(max_num_seqs)
        self.qo_indptr = buffer(max_num_seqs + 1)
        self.slots = buffer(max_num_tokens)

    def fill(self, step: Step) -> None:
        """Copies a step's arrays, on the device and without waiting for it.

        Raises:
            ValueError: more pages than sequences of max_model_len can have.
        """
        metadata = step.metadata
        num_pages = int(metadata.paged_kv_indptr_host[-1])  # host memory
        if num_pages > self.pages.shape[0]:
            raise ValueError(
                f"the step has {num_pages} pages; sequences of max_model_len need {self.pages.shape[0]} at most"
            )
        self.kv_indptr[: step.num_seqs + 1].copy_(metadata.paged_kv_indptr)
        self.pages[:num_pages].copy_(metadata.paged_kv_indices[:num_pages])
        self.last_page_lens[: step.num_seqs].copy_(metadata.paged_kv_last_page_len)
        self.slots[: step.num_tokens].copy_(metadata.slot_mapping)
        if step.phase is not Phase.DECODE and metadata.qo_indptr is not None:
            self.qo_indptr[: step.num_seqs + 1].copy_(metadata.qo_indptr)
