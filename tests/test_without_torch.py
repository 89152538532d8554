"""The converter's commands where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from real import ROOT, one_line

NEEDED = {
    "convert.base": ["a", "b"],
    "examples.recipes.chat_prompts": ["--out", "a"],
    "convert.continuations": ["--prompts", "a", "--out", "b"],
    "convert.train": ["--data", "a", "--out", "b"],
    "convert.train_draft": ["--data", "a", "--out", "b"],
    "convert.train_heads": ["--kind", "medusa", "--data", "a", "--out", "b"],
}


def run(module: str, *args: str, cwd=ROOT) -> subprocess.CompletedProcess:
    """`python -m ...` in a process that finds no PyTorch."""
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.modules['torch'] = None\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


@pytest.mark.parametrize(
    "module", [*NEEDED, "convert", "examples.recipes.e2e_prompts", "convert.export"]
)
def test_help_comes_without_torch(module):
    done = run(module, "--help")
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout


@pytest.mark.parametrize("module", NEEDED)
def test_a_run_without_torch_says_what_to_install(module, tmp_path):
    done = run(module, *NEEDED[module], cwd=tmp_path)
    assert done.returncode == 2
    line = one_line(done.stderr, module)
    assert "the package torch is not installed; expected what the extra torch brings" in line
    assert line.endswith('`pip install -e ".[torch]"`')
    assert not list(tmp_path.iterdir())
