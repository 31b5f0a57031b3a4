"""Triton kernels. Nothing here decides anything: launchers in bigpool.ops choose shapes, splits and tiles."""
