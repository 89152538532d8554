"""Prompts that were processed once: their keys and values, in memory and on disk.

| file | what it has |
|---|---|
| `cache.py` | `PromptCache`, which answers begin from and add to |
| `prompt_files.py` | the file format of one prompt, and a folder of such files |
| `unfinished_files.py` | files that are seen when they are whole; what killed processes have left |
"""

from .cache import PromptCache, place_to_keep_for_next_turn

__all__ = ["PromptCache", "place_to_keep_for_next_turn"]
