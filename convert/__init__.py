"""Converting checkpoints, and the PyTorch reference that conversions are checked against."""
