"""Where a command's results go: onto the screen, and into files."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..loading.files import write_whole


def print_and_save(result: Mapping[str, Any], target: Path, text: str) -> None:
    """Print a result's text; write `target`.json with the result, and `target`.txt with the
    text."""
    print(text)
    saved = json.dumps(result, indent=1, ensure_ascii=False)
    write_whole(target.with_suffix(".json"), f"{saved}\n".encode())
    write_whole(target.with_suffix(".txt"), f"{text}\n".encode())
    print("saved", target.with_suffix(".json"), file=sys.stderr)


def print_save_and_draw(
    result: Mapping[str, Any], target: Path, text: str, draw: Callable[[Any, Path], None]
) -> None:
    """Do what `print_and_save` does, then draw `target`.png; without matplotlib, say so instead.

    Args:
        result: JSON values.
        target: path without a suffix.
        text: what is printed.
        draw: draws a result into a file.
    """
    print_and_save(result, target, text)
    try:
        draw(result, target.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
