"""`python -m perf.predict`."""
