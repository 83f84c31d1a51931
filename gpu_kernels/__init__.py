"""Kernels written in Triton, and the table of how they are launched on each GPU."""
