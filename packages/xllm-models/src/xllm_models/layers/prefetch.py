"""`PrefetchingModule`: a module whose kernel can prefetch a weight for the next matrix product."""

from __future__ import annotations

import torch
from torch import nn


class PrefetchingModule(nn.Module):
    """Holds the weight of the next linear layer, `next_weight`, which `passes.prefetch` sets when a model is built.

    The kernel prefetches it into L2 during its own run. No result depends on it. It is another layer's parameter: not
    in this module's parameters or state dict, and right as long as weights are loaded in place.
    """

    next_weight: torch.Tensor | None = None

    def set_next_weight(self, weight: torch.Tensor | None) -> None:
        """Set it without registering it as a parameter of this module, which `nn.Module` would do."""
        object.__setattr__(self, "next_weight", weight)
