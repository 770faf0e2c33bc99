"""The `torch` backend: any device, plain PyTorch ops. The oracle for the others, and what runs on a CPU."""

from .backend import TorchBackend

__all__ = ["TorchBackend"]
