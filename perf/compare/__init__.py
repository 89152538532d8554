"""`python -m perf.compare`."""
