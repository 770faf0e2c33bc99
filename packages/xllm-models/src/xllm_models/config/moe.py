"""The configuration of a mixture of experts.

Owns the parsing. Routing and weights belong to `layers` and the families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .keys import ConfigKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The experts of the sparse layers, and the list of sparse layers."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one whole expert, not of one rank's shard
    normalize: bool  # whether the top-k routing weights are scaled to sum to 1
    sparse_step: int  # every n-th layer is sparse
    dense_layers: tuple[int, ...]  # exceptions: these layers are dense

    def __post_init__(self) -> None:
        if not 0 < self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_token} is outside 1 to num_experts {self.num_experts}"
            )
        if self.sparse_step < 1:
            raise ValueError(f"decoder_sparse_step must be at least 1, got {self.sparse_step}")

    @classmethod
    def parse(cls, keys: ConfigKeys) -> MoEConfig | None:
        """None for a model without experts. Without moe_intermediate_size the experts have the MLP's size (Mixtral)."""
        num_experts = keys.optional_int("num_experts", "num_local_experts", "n_routed_experts")
        if not num_experts:
            return None
        return cls(
            num_experts=num_experts,
            num_experts_per_token=keys.integer("num_experts_per_tok"),
            intermediate_size=keys.integer("moe_intermediate_size", default=keys.optional_int("intermediate_size")),
            normalize=keys.boolean("norm_topk_prob", default=False),
            sparse_step=keys.integer("decoder_sparse_step", default=1),
            dense_layers=keys.integers("mlp_only_layers"),
        )

    def is_sparse(self, layer_id: int) -> bool:
        return layer_id not in self.dense_layers and (layer_id + 1) % self.sparse_step == 0

    def to_model_args(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": self.normalize,
            "decoder_sparse_step": self.sparse_step,
            "mlp_only_layers": list(self.dense_layers),
        }
