"""What decoding costs on this machine, and which way to draft is fastest on it."""

CONTEXTS = (64, 512, 2048)
"""Committed tokens behind which forwards are timed, unless others are named."""
BUSY = 0.15
"""A spread of timings beyond which the machine was not alone with us."""
