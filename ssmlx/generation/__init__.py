"""Answers from loaded models: what their steps cost on this machine."""
