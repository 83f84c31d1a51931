"""Kernels written in Triton, and their launch settings for each GPU."""
