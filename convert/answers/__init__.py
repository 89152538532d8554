"""Prompts, and a model's own answers."""
