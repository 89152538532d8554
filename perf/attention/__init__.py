"""`python -m perf.attention`."""
