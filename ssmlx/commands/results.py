"""Where a command's results go: onto the screen, and into files."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..loading.files import write_whole


def write_result(result: Mapping[str, Any], target: Path, text: str) -> None:
    """Print a result's text, and write `target`.json and .txt."""
    print(text)
    saved = json.dumps(result, indent=1, ensure_ascii=False)
    write_whole(target.with_suffix(".json"), f"{saved}\n".encode())
    write_whole(target.with_suffix(".txt"), f"{text}\n".encode())
    print("saved", target.with_suffix(".json"), file=sys.stderr)


def publish(
    result: Mapping[str, Any], target: Path, text: str, draw: Callable[[Any, Path], None]
) -> None:
    write_result(result, target, text)
    try:
        draw(result, target.with_suffix(".png"))
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
