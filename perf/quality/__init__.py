"""`python -m perf.quality`."""
