"""`python -m perf.calibrate`."""
