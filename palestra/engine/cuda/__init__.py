"""Kernels and graphs of CUDA."""
