"""The `triton` backend: fused append and split-KV attention for CUDA; the same kernels run in Triton's interpreter."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
