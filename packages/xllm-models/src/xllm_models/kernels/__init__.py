"""Triton kernels of the compute ops and collectives, for CUDA. `ops` imports a module at its first call on CUDA."""
