"""What CONTRIBUTING.md adds, a drafter and a model family, works as it says."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from real import ROOT, write_base

EXAMPLE = re.compile(r"```(python|diff)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def examples():
    """(language, path, text) of each example, a drafter's two and a family's two."""
    return EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text())


@pytest.fixture(scope="module")
def copy(tmp_path_factory, examples):
    """A copy of the package with the examples in it."""
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("adapters", "__pycache__")
    shutil.copytree(ROOT / "ssmlx", root / "ssmlx", ignore=ignored)
    for language, path, text in examples:
        if language == "python":
            assert not (root / path).exists()
            (root / path).write_text(text)
        else:
            (root / path).write_text(patched((root / path).read_text(), text))
    return root


def patched(source: str, diff: str) -> str:
    """A file with the hunks of a diff in it; each must stand there once."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def test_a_drafter_is_a_file_and_its_place_in_a_list(examples):
    paths = ["ssmlx/drafters/bigram.py", "ssmlx/settings.py"]
    assert [path for _, path, _ in examples[:2]] == paths


@pytest.mark.slow
def test_both_work(copy, tmp_path):
    base = write_base(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_type": "relu_llama"}))

    def answer(*more):
        asked = ["--model", base, "--prompt", "w1 w2 w3 w1 w2", "--jsonl", "--max-tokens", "24"]
        done = subprocess.run(
            [sys.executable, "-m", "ssmlx.generate", *asked, *more],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    plain = answer("--decoding", "plain")
    # At every call, as asked for: a controller may decide that 24 tokens are not worth it.
    drafted = answer("--drafter", "bigram tokens=6", "--decoding", "speculative")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["target_calls"] < plain["target_calls"]
