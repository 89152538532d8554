"""What CONTRIBUTING.md adds, a drafter and a model family, works as it says."""

import json
import os
import re
import shutil
import subprocess
import sys

import mlx.core as mx
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
    shutil.copy(ROOT / "pyproject.toml", root)
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


def make_scaled(base):
    """Make a Llama of the example's family: its scales are stored beside the other weights."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_type": "scaled_llama"}))
    path = str(base / "model.safetensors")
    weights = dict(mx.load(path))
    for name, norm in list(weights.items()):
        if name.endswith("layernorm.weight"):
            layer = name.partition(".input_")[0].partition(".post_")[0]
            branch = "attention" if "input" in name else "mlp"
            weights[f"{layer}.{branch}_scale"] = mx.full(norm.shape, 0.5)
    mx.eval(weights)
    mx.save_safetensors(path, weights)


@pytest.mark.slow
def test_their_types_are_strict(copy):
    pytest.importorskip("mypy")
    files = ["ssmlx/drafters/bigram.py", "ssmlx/model/scaled_llama.py"]
    command = [sys.executable, "-m", "mypy", *files, "ssmlx/settings.py", "ssmlx/loading/load.py"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_both_work(copy, tmp_path):
    base = write_base(tmp_path / "base")
    make_scaled(base)

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
    assert drafted["drafts"]["bigram"]["accepted"] > 0
    assert answer("--drafter", "bigram")["tokens"] == plain["tokens"]
