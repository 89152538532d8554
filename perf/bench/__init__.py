"""`python -m perf.bench`."""
