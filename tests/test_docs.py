"""The documents: every link and option in them is there."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of other programs.
OTHERS = {
    *("--dist", "--allow-existing", "--random-source", "--adhoc-sign", "--backend", "--hosts"),
    *("--hf-path", "--mlx-path", "--dequantize", "--train"),
}


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


DOCUMENTS = [path for path in tracked("*.md") if path != "CHANGELOG.md"]  # which tells of the past


@cache
def known_words() -> set[str]:
    """Every word of our sources: options stand there, or the settings' fields that they set."""
    sources = tracked(
        "ssmlx/*.py", "convert/*.py", "perf/*.py", "examples/*.py", "tests/replayed.py"
    )
    text = "".join((ROOT / path).read_text() for path in sources)
    return {*re.findall(r"--[a-z][a-z0-9-]*|\w+", text)}


def found_in(name: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / name).read_text()))


@pytest.mark.parametrize(
    "card", tracked("ssmlx/adapters/*/README.md", "examples/adapters/*/README.md")
)
def test_the_notice_tells_what_every_adapter_was_trained_on(card):
    (data,) = found_in(card, r"(?m)^\| data \|.*")
    names = re.findall(r"CC [A-Z-]+ \d\.\d|[A-Z]\w*[A-Z]\w*", data)  # data sets and licences
    notice = (ROOT / "NOTICE").read_text()
    assert [one for one in (f"`{Path(card).parent.name}`", *names) if one not in notice] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    links = found_in(name, r"\]\((?!http)([^)\s#]+)")
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives the headings of a document."""
    text = re.sub(r"(?s)```.*?```", "", path.read_text())
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    words = [re.sub(r"[^\w\- ]", "", title.lower().strip()) for title in titles]
    return {title.replace(" ", "-") for title in words}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_anchors_are_headings(name):
    links = found_in(name, r"\]\((?!http)([^)\s#]*#[^)\s]+)")
    parts = [link.partition("#") for link in links]
    files = {link: (ROOT / name).parent / link if link else ROOT / name for link, _, _ in parts}
    assert [(a, b) for a, _, b in parts if b not in anchors(files[a])] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_are_there(name):
    options = found_in(name, r"(?<![\w-])--[a-z][a-z0-9-]+") - OTHERS - known_words()
    assert [one for one in options if one[2:].replace("-", "_") not in known_words()] == []
