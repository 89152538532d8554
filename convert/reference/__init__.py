"""The model in PyTorch."""
