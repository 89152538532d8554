"""Runs a saved Core ML package on any machine: a test tool, see `interpreter.py`."""
