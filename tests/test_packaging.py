"""The wheel: it runs outside the checkout, converter included, and leaks no top-level name."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Stands in for the adapters that are bundled, whichever there are.
BUNDLED = [f"ssmlx/adapters/probe/{name}" for name in ("streams_config.json", "README.md")]
# Commands that help texts, messages and the README name, and that need no checkout.
COMMANDS = ("chat", "generate", "server", "train", "export", "exported", "convert")
pytestmark = pytest.mark.slow


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


def sources(*folders: str) -> set[str]:
    """What git keeps of the packages, but Markdown: it is all that the wheel should hold."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return {path for path in listed if not path.endswith(".md")}


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith(".md")}
    licences = {name for name in names if ".dist-info/" in name}
    expected = sources("ssmlx") | {f"ssmlx/{path}" for path in sources("convert")}
    assert names - licences - set(BUNDLED) == expected
    for licence in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f"licenses/{licence}") for name in licences)


def test_wheel_runs_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    assert (target / BUNDLED[-1]).exists()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for command in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", f"ssmlx.{command}", "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "python -m " in done.stdout
    code = "import ssmlx.convert.formats.adapter as a; print(a.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(target)), done.stderr
