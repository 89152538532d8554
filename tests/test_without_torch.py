"""The converter's commands where PyTorch is not installed."""

import json
import subprocess
import sys

import pytest
from real import ROOT
from refusals import one_line

NEEDED = {
    "convert.base": ["a", "b"],
    "examples.recipes.chat_prompts": ["--out", "a"],
    "convert.continuations": ["--prompts", "a", "--out", "b"],
    "convert.train": ["--data", "a", "--out", "b"],
    "convert.train_heads": ["--kind", "medusa", "--data", "a", "--out", "b"],
}
HELPED = [*NEEDED, "convert", "convert.export", "examples.recipes.e2e_prompts"]
# Runs commands in one process that finds no PyTorch: [exit code, output, errors] of each.
RUN = """
import contextlib, io, json, runpy, sys
root, runs = json.loads(sys.argv[1])
sys.path.insert(0, root)
sys.modules["torch"] = None
told = []
for module, *args in runs:
    sys.argv = [module, *args]
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    runs = [[module, "--help"] for module in HELPED]
    runs += [[module, *args] for module, args in NEEDED.items()]
    command = [sys.executable, "-W", "ignore", "-c", RUN, json.dumps([str(ROOT), runs])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    answers = json.loads(done.stdout)
    return {(run[0], "--help" in run): answer for run, answer in zip(runs, answers, strict=True)}


@pytest.mark.parametrize("module", HELPED)
def test_help_comes_without_torch(module, told):
    code, out, _ = told[module, True]
    assert code == 0
    assert "example" in out


@pytest.mark.parametrize("module", NEEDED)
def test_a_run_without_torch_says_what_to_install(module, told):
    code, _, err = told[module, False]
    assert code == 2
    line = one_line(err, module.replace("convert.", "ssmlx.convert."))
    assert 'pip install "ssmlx[torch]"' in line
