"""Where a command's results go: onto the screen, and into files."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..loading.files import write_whole


def print_and_save_json_and_txt(result: Mapping[str, Any], target: Path, text: str) -> None:
    """Print a result's text, and save both beside each other.

    `target`.json gets the result, `target`.txt the text. Standard error says where.

    Args:
        result: JSON values.
        target: path without a suffix; its folder exists.
        text: what is printed.
    """
    print(text)
    saved = json.dumps(result, indent=1, ensure_ascii=False)
    write_whole(target.with_suffix(".json"), f"{saved}\n".encode())
    write_whole(target.with_suffix(".txt"), f"{text}\n".encode())
    print("saved", target.with_suffix(".json"), file=sys.stderr)


def print_save_and_draw_png(
    result: Mapping[str, Any], target: Path, text: str, draw: Callable[[Any, Path], None]
) -> None:
    """Do what `print_and_save_json_and_txt` does, then draw `target`.png; without matplotlib, say
    so on standard error.

    Args:
        result: JSON values.
        target: path without a suffix; its folder exists.
        text: what is printed.
        draw: draws a result into a file; an ImportError of it means that matplotlib is missing.
    """
    print_and_save_json_and_txt(result, target, text)
    try:
        draw(result, target.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
