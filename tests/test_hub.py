"""Adapters from the Hugging Face Hub, and to it; the Hub is on this machine."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from real import answer, answering, refusal, snapshot, write_base

import ssmlx
from ssmlx.commands import chat
from ssmlx.loading import names
from ssmlx.loading.names import Fetch, resolve_adapter

FIRST, SECOND = "a" * 40, "b" * 40
PICKLE = b"\x80\x04cos\nsystem\n(S'false'\ntR."


class Hub:
    """Repositories at commits, as the Hub's HTTP API has them; what it is asked is recorded."""

    def __init__(self) -> None:
        self.commits, self.branches, self.asked = {}, {"main": FIRST}, []
        self.sent = {}  # in place of what is listed, by file
        self.sizes = {}  # that are listed, in place of the files' own
        self.refusal = ()  # a status, and the code of an error

    def listed(self, file: str, content: bytes) -> dict:
        size = self.sizes.get(file, len(content))
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        known = {"size": size, "blobId": blob, "oid": blob, "rfilename": file, "path": file}
        if file.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            known["lfs"] = {"size": size, "sha256": digest, "oid": digest, "pointerSize": 134}
        return {**known, "type": "file"}

    def answer(self, path: str) -> tuple[int, dict, bytes]:
        self.asked.append(path)
        if self.refusal:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b"{}"
        path, _, _ = path.partition("?")
        what, _, rest = path.partition("/org/name")
        revision = rest.split("/")[2] if rest.count("/") > 1 else "main"
        commit = self.branches.get(revision, revision)
        if what not in ("", "/api/models"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if commit not in self.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.commits[commit]
        known = [self.listed(file, content) for file, content in files.items()]
        if what and "/tree/" in rest:
            return 200, {}, json.dumps(known).encode()
        if what:
            found = {"id": "org/name", "sha": commit, "siblings": known, "private": False}
            return 200, {}, json.dumps(found).encode()
        file = rest.split("/", 3)[3]
        content = self.sent.get(file, files[file])
        digest = self.listed(file, files[file])
        etag = digest.get("lfs", {}).get("sha256", digest["blobId"])
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content

    @property
    def fetched(self) -> set[str]:
        """Files whose contents were asked for."""
        return {path.split("/", 5)[5] for path in self.asked if path.startswith("/org/name/res")}


@pytest.fixture(scope="module")
def server():
    with answering(lambda path, headers: server.hub.answer(path)) as server:
        yield server


@pytest.fixture
def hub(server, monkeypatch, tmp_path, adapter, caplog):
    caplog.set_level("INFO", "ssmlx")
    place = f"http://127.0.0.1:{server.server_port}"
    template = place + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    server.hub = Hub()
    server.hub.commits[FIRST] = {path.name: path.read_bytes() for path in adapter.iterdir()}
    return server.hub


def test_an_adapter_of_the_hub_is_one_commit_fetched_once(hub, base, adapter, tmp_path, caplog):
    hub.commits[SECOND] = hub.commits[FIRST] | {"figures.json": b"{}"}
    hub.commits[FIRST] |= {"x.bin": PICKLE, "model.py": b"1 / 0", "../evil.json": b"{}"}
    hub.commits[FIRST] |= {"sub/streams.safetensors": b"", "/etc/streams.safetensors": b""}
    told = []
    found = resolve_adapter("org/name", Fetch(progress=lambda *counts: told.append(counts)))
    assert snapshot(found) == snapshot(adapter) and found.name == FIRST
    assert hub.fetched == {path.name for path in adapter.iterdir()} and told[-1][0] == told[-1][1]
    assert f"org/name: commit {FIRST}" in caplog.text
    hub.branches["main"], asked = SECOND, len(hub.asked)
    for name in ("org/name", f"org/name@{FIRST}", "org/name@main"):
        assert resolve_adapter(name, Fetch(offline=True)) == found
    assert len(hub.asked) == asked
    newer = resolve_adapter(f"org/name@{SECOND}")
    assert newer.name == SECOND and (newer / "figures.json").is_file()
    assert resolve_adapter("org/name") == found
    own = resolve_adapter("org/name", Fetch(cache_dir=tmp_path / "own"))
    assert own.name == SECOND and own.is_relative_to(tmp_path / "own" / "hub")
    # What is here goes first.
    shutil.copytree(adapter, tmp_path / "org" / "name")
    assert resolve_adapter("org/name") == Path("org/name")
    assert resolve_adapter("org/other") == Path("org/other")


def test_load_swap_and_engine_take_it(hub, base, adapter):
    expected, _ = answer(*ssmlx.load(base, adapter=adapter), "w1 w2", max_tokens=9)
    model, tokenizer = ssmlx.load(base, adapter="org/name")
    assert answer(model, tokenizer, "w1 w2", max_tokens=9)[0] == expected
    plain, _ = ssmlx.load(base, offline=True)
    assert ssmlx.swap_adapter(plain, f"org/name@{FIRST}").num_streams == model.num_streams
    talk = chat.Chat(ssmlx.ChatSession(plain, tokenizer), chat.Screen(), None)
    assert chat.adapter("org/name", talk).startswith("adapter org/name: 2 streams draft")
    hub.commits[SECOND] = hub.commits[FIRST]
    assert "(offline)" in refusal(ssmlx.swap_adapter, plain, f"org/name@{SECOND}")
    with ssmlx.Engine(base, ["org/name"]) as engine:
        assert engine.adapters == ["none", "org/name"]


def test_another_base_is_refused_by_both_names(hub, base, tmp_path):
    other = write_base(tmp_path / "other", seed=1, norm=2.0)
    message = refusal(ssmlx.load, other, adapter="org/name")
    assert "belongs to another base model: this one has other weights" in message
    made_for = json.loads(hub.commits[FIRST]["streams_config.json"])["base_model"]
    assert f"expected {made_for or 'the model it was converted for'}, not {other};" in message


STREAMS, SETTINGS = "streams.safetensors", "streams_config.json"


@pytest.mark.parametrize(("file", "size"), [
    (STREAMS, 2**30 + 1), (SETTINGS, 2**20 + 1), ("figures.json", None), (STREAMS, -1)
])  # fmt: skip
def test_what_is_too_large_is_not_fetched(hub, file, size):
    hub.commits[FIRST].setdefault(file, b"{}")
    hub.sizes[file] = size
    assert f"org/name has {file} of " in refusal(resolve_adapter, "org/name")
    assert hub.fetched == set()
    hub.sizes = dict.fromkeys((STREAMS, "adapters.safetensors"), 2**30)
    assert "org/name has files of 2147" in refusal(resolve_adapter, "org/name")
    assert hub.fetched == set()


@pytest.mark.parametrize("file", [STREAMS, SETTINGS])
def test_what_is_not_what_was_listed_is_not_kept(hub, file, monkeypatch):
    content = hub.commits[FIRST][file]
    for sent in (content[:-1] + b"?", content + b"?", content[:-1]):
        hub.sent = {file: sent}
        assert f"other contents of {file} came" in refusal(resolve_adapter, "org/name")
        assert "org/name is not in " in refusal(resolve_adapter, "org/name", Fetch(offline=True))
    with monkeypatch.context() as patch:
        patch.setattr(names, "_MOST_IN_ALL", sum(map(len, hub.commits[FIRST].values())) + 1)
        hub.sent = {file: content + bytes(2**20)}
        assert "org/name has files of " in refusal(resolve_adapter, "org/name")
    hub.sent = {}
    assert snapshot(resolve_adapter("org/name")) == hub.commits[FIRST]


def test_a_hub_that_has_none_is_told_in_one_line(hub, monkeypatch):
    for refused, said in (
        ((403, "GatedRepo"), "org/name is gated on the Hugging Face Hub"),
        ((401, "GatedRepo"), "org/name is gated on the Hugging Face Hub"),
        ((401, "RepoNotFound"), "no folder org/name, and the Hugging Face Hub shows you none"),
        ((404, "RepoNotFound"), "no folder org/name, and the Hugging Face Hub shows you none"),
        ((403, ""), "org/name cannot be had from the Hugging Face Hub (403 Forbidden"),
        ((500, ""), "org/name cannot be had from the Hugging Face Hub (Server error"),
    ):
        hub.refusal = refused
        assert refusal(resolve_adapter, "org/name").startswith(said)
    hub.refusal = ()
    assert "org/name has no revision 'v9'" in refusal(resolve_adapter, "org/name@v9")
    hub.branches["v9"], hub.commits["../../x"] = "../../x", hub.commits[FIRST]
    assert "in commit '../../x' of org/name" in refusal(resolve_adapter, "org/name@v9")
    for name in ("org/name@../x", "org/..", "org/name@/etc/x"):
        assert resolve_adapter(name) == Path(name)
    hub.commits[FIRST] = {"model.safetensors": b""}
    assert "no streams_config.json in commit" in refusal(resolve_adapter, "org/name")
    assert hub.fetched == set()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "org/name cannot be had from the Hugging" in refusal(resolve_adapter, "org/name")
