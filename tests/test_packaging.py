"""The wheel: it runs outside the checkout, converter included, and leaks no top-level name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands in for the adapters that are bundled, whichever there are.
BUNDLED = [f"ssmlx/adapters/probe/{name}" for name in ("streams_config.json", "README.md")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    source = out / "source"
    command = ["git", "clone", "--quiet", str(ROOT), str(source)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("not a git checkout")
    for file in BUNDLED:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).touch()
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(out), str(source)]
    subprocess.run(build, check=True)
    (built,) = out.glob("ssmlx-*.whl")
    return built


def test_wheel_has_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ssmlx"}
    assert {"ssmlx/py.typed", "ssmlx/convert/__main__.py", "ssmlx/cli/chat.py"} <= set(names)
    assert {"ssmlx/metal/attention.metal", "ssmlx/convert/mil/ops/linear.py"} <= set(names)
    assert set(BUNDLED) <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_runs_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for module in ("ssmlx.chat", "ssmlx.generate", "ssmlx.convert"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "examples:" in done.stdout
    code = "import ssmlx.convert.adapter as a; print(a.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(target)), done.stderr
