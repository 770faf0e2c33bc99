"""Triton implementations of the compute ops, for CUDA; `ops` imports them at the first call on such a device."""
