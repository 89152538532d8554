"""Text that a small model is trained on, and text that is held out from it.

A source is a kind of text: the files of a data folder, a folder's Markdown, Python's standard
library. Each source holds out whole files, for Python whole packages.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ssmlx.errors import require
from ssmlx.prompts import read_prompts

END = "<|endoftext|>"
MARKDOWN = "documents"
PYTHON = "python"
_HELD_OUT_ONE_IN = 12
# Bounds on a file's characters; longer ones in the standard library are tables.
_SHORTEST_FILE = 200
_LONGEST_FILE = 200_000


@dataclass
class Source:
    """Texts of one kind."""

    name: str
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)  # no file is split between this and `train`


def read_sources(
    data: Path,  # a folder per task, with `train.jsonl` and `test.jsonl`: `prompt` and `completion`
    documents: Path,  # its Markdown files are read, in its folders too
) -> list[Source]:
    """Read a source for each task, by name, then one of documents and one of Python's library."""
    tasks = sorted(path.parent for path in data.glob("*/train.jsonl"))
    require(
        bool(tasks),
        f"--data {data}",
        expected="a folder with folders that have train.jsonl and test.jsonl",
        do="give the folder above those of the tasks",
    )
    sources = [
        Source(
            task.name,
            *(_read_prompts_with_completions(task / f"{part}.jsonl") for part in ("train", "test")),
        )
        for task in tasks
    ]
    markdown = (path for path in sorted(documents.rglob("*.md")) if not _is_hidden(path))
    sources.append(_read_and_split_files(MARKDOWN, documents, markdown))
    library = Path(sysconfig.get_path("stdlib"))
    python = (
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts)
    )
    sources.append(_read_and_split_files(PYTHON, library, python))
    return sources


def is_held_out(group: str) -> bool:
    """Whether a group is held out: about one in twelve, always the same ones."""
    digest = hashlib.sha256(group.encode()).digest()
    return digest[0] % _HELD_OUT_ONE_IN == 0


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_prompts_with_completions(path: Path) -> list[str]:
    texts = []
    for number, row in enumerate(read_prompts(path, "--data"), 1):
        require(
            isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str),
            f"{path}, object {number}, is not an example",
            expected="`prompt` and `completion`, texts",
            do="correct the line",
        )
        texts.append(f"{row['prompt']}\n{row['completion']}\n")
    return texts


def _read_and_split_files(name: str, folder: Path, files: Iterable[Path]) -> Source:
    """Read and split files; all files of one of `PYTHON`'s packages are held out, or none."""
    source = Source(name)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        if _SHORTEST_FILE < len(text) < _LONGEST_FILE:
            parts = path.relative_to(folder).parts
            group = parts[0] if name == PYTHON else "/".join(parts)
            (source.held_out if is_held_out(group) else source.train).append(text)
    return source
