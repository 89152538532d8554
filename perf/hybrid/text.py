"""Text that a small model is trained on, and text that is held out from it.

A source is a kind of text: the files of a data folder, a folder's Markdown, Python's standard
library. Each source holds out whole files, for Python whole packages.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ssmlx.errors import InputError

END = "<|endoftext|>"
MARKDOWN = "documents"
PYTHON = "python"
_HELD_OUT_ONE_IN = 12
_LARGEST_FILE = 200_000  # characters; larger files of the standard library are tables


@dataclass
class Source:
    """Texts of one kind.

    Attributes:
        name: of the source.
        train: texts to train on.
        held_out: texts of files that no text of `train` comes from.
    """

    name: str
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def read_sources(data: Path, documents: Path) -> list[Source]:
    """Read all texts.

    Args:
        data: a folder with a folder for each task, which has `train.jsonl` and `test.jsonl`: lines
            of JSON with `prompt` and `completion`.
        documents: a folder; its Markdown files are read, in its folders too.

    Returns:
        A source for each task, by name, then one of documents and one of Python's library.

    Raises:
        InputError: `data` has no such folder.
    """
    tasks = sorted(path.parent for path in data.glob("*/train.jsonl"))
    if not tasks:
        raise InputError(
            f"{data} has no folder with a train.jsonl",
            expected="folders with train.jsonl and test.jsonl",
            do="give the folder of the data by --data",
        )
    sources = [
        Source(task.name, list(_read_lines(task / "train.jsonl")), _held_out(task))
        for task in tasks
    ]
    markdown = (path for path in sorted(documents.rglob("*.md")) if not _is_hidden(path))
    sources.append(_split(MARKDOWN, documents, markdown))
    library = Path(sysconfig.get_path("stdlib"))
    python = (
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts)
    )
    sources.append(_split(PYTHON, library, python))
    return sources


def is_held_out(group: str) -> bool:
    """Whether files of `group`, a name, are held out: about one in twelve, always the same."""
    digest = hashlib.sha256(group.encode()).digest()
    return digest[0] % _HELD_OUT_ONE_IN == 0


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _held_out(task: Path) -> list[str]:
    return list(_read_lines(task / "test.jsonl"))


def _read_lines(path: Path) -> Iterator[str]:
    """Yield each line's prompt and completion as one text."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            example = json.loads(line)
            yield f"{example['prompt']}\n{example['completion']}\n"


def _split(name: str, folder: Path, files: Iterable[Path]) -> Source:
    """Read `files`, in `folder`, and hold out some, all of a top-level folder or none."""
    source = Source(name)
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        if 200 < len(text) < _LARGEST_FILE:
            group = path.relative_to(folder).parts[0]
            if name == MARKDOWN:
                group = str(path.relative_to(folder))
            (source.held_out if is_held_out(group) else source.train).append(text)
    return source
