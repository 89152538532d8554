"""Runs Metal kernels on the CPU, for their meaning: see `shim`."""
