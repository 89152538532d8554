"""Draw a chat as it happened: `python -m perf.chat_picture` holds one and writes it as an SVG.

The chat is `python -m ssmlx.chat` on a terminal, asked `QUESTIONS` one after the other; the picture
shows what came back, times and all.
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

COMMAND = ["ssmlx.chat", "--max-tokens", "48"]
QUESTIONS = [
    "Name three colours of the rainbow.",
    "/adapter sql",
    "/reset",
    "what's the grid with time +37.949? CREATE TABLE table_13742683_4 (grid VARCHAR, time VARCHAR)",
    "/compare",
]
PROMPT = "> "
COLUMNS, LINE, LETTER, MARGIN = 92, 19, 7.8, 16  # characters, and pixels
PICTURE = Path(__file__).parent / "figures" / "chat.svg"
_DIM = "\x1b[2m"


def hold_chat() -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", *COMMAND],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "400"},
    )  # fmt: skip
    os.close(theirs)
    shown = ""
    for line in [*QUESTIONS, "/quit"]:
        said = ""
        while not said.endswith("\n" + PROMPT) and said != PROMPT:
            read = os.read(ours, 4096).decode(errors="replace")
            if not read or process.poll() is not None:
                raise SystemExit(f"the chat ended:\n{said}{read}")
            said += read.replace("\r\n", "\n")
        shown += said
        os.write(ours, f"{line}\n".encode())
    process.wait()
    os.close(ours)
    return shown.removesuffix(PROMPT).rstrip()


def lines_of(shown: str) -> list[tuple[str, str]]:
    """(kind, text) of each line of the picture: "asked", "noted" or "said"."""
    found = [("asked", f"$ python -m {' '.join(COMMAND)}")]
    for line in shown.split("\n"):
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line.split("\r")[-1])
        kind = "asked" if text.startswith(PROMPT) else "noted" if _DIM in line else "said"
        text = text.replace(str(Path.home()), "~")
        found += [(kind, part) for part in textwrap.wrap(text, COLUMNS) or [""]]
    return found


def draw(lines: list[tuple[str, str]]) -> str:
    width, height = COLUMNS * LETTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    rows = [
        f'<text class="{kind}" x="{MARGIN}" y="{y:g}">{escape(text, quote=False)}</text>'
        for n, (kind, text) in enumerate(lines)
        if (y := MARGIN + LINE * (n + 0.75))
    ]
    style = (
        "text { font: 13px ui-monospace, Menlo, Consolas, monospace; white-space: pre }"
        " .said { fill: #e6edf3 } .noted { fill: #9aa4af }"
        " .asked { fill: #7ee787; font-weight: 600 }"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">'
    back = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#0d1117"/>'
    return "\n".join([head, f"<style>{style}</style>", back, *rows, "</svg>", ""])


if __name__ == "__main__":
    argparse.ArgumentParser(prog="perf.chat_picture", description=__doc__).parse_args()
    PICTURE.write_text(draw(lines_of(hold_chat())))
    print(PICTURE)
