"""Prompts that were processed once: their keys and values, in memory and on disk."""

from .cache import PromptCache, place_for_next_turn

__all__ = ["PromptCache", "place_for_next_turn"]
