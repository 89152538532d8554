"""Prompts that were processed once: their keys and values, in memory and on disk.

| file | what it has |
|---|---|
| `cache.py` | `PromptCache`, which answers begin from and add to |
| `prompt_files.py` | the file format of one prompt, and a folder of such files |
"""

from .cache import PromptCache

__all__ = ["PromptCache"]
