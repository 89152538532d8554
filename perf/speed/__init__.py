"""`python -m perf.speed`."""
