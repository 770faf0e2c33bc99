"""The `flashinfer` backend: FlashInfer's kernels, planned from the host mirrors. Extra: xllm-attention[flashinfer]."""

from .backend import FlashInferBackend

__all__ = ["FlashInferBackend"]
