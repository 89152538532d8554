"""Tests see nothing of what their user has set: `conftest.py`, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import conftest

READ = """
import json, os, subprocess, tempfile
import conftest
hooks = subprocess.run(["git", "config", "core.hooksPath"], capture_output=True, text=True).stdout
user = conftest.environment_to_find_model(conftest._users_environment)
print(json.dumps([dict(os.environ), tempfile.gettempdir(), hooks, user]))
"""
DROPPED = (
    "GIT_DIR", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "LLM_USER_PATH", "PROMETHEUS_MULTIPROC_DIR",
    "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS", "NODE_OPTIONS",
    "TORCH_HOME", "PYRIGHT_PYTHON_DEBUG", "PLAYWRIGHT_BROWSERS_PATH", "LD_PRELOAD",
    "HF_HOME", "OMP_PLACES",
)  # fmt: skip
KEPT = ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "npm_config_registry")


def test_what_a_user_has_set_decides_nothing(tmp_path):
    (tmp_path / ".gitconfig").write_text("[core]\n\thooksPath = /hooks\n")
    own = {name: "" if name == "LD_PRELOAD" else "x" for name in (*DROPPED, *KEPT)}
    own |= {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PYTEST_XDIST_WORKER": "gw7"}
    own |= {"SSMLX_TESTS_HOME": str(tmp_path / "run"), "PATH": os.environ["PATH"]}
    own["PYTHONPATH"] = str(Path(conftest.__file__).parents[1])
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=Path(conftest.__file__).parent,
        env={**own, "NODE_OPTIONS": "--x"},
        capture_output=True,
        text=True,
        check=True,
    )
    environment, folder, hooks, user = json.loads(done.stdout)
    assert not {*DROPPED} & environment.keys() and {*KEPT} <= environment.keys()
    assert hooks == ""
    assert folder == environment["TMPDIR"] and Path(folder).is_relative_to(tmp_path / "run" / "gw7")
    assert user["HF_HOME"] == "x" and "HF_HUB_OFFLINE" not in user, "the Hub's cache is the user's"
