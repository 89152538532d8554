"""Adapters from the Hugging Face Hub, and to it; the Hub is on this machine."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants
from real import answer, answering, snapshot, write_base
from refusals import exit_code, found_in, mentions, one_line, refusal
from tiny_lora import write_lora

import ssmlx
from ssmlx.commands import upload
from ssmlx.commands.chat_answers import Chat
from ssmlx.commands.chat_screen import Screen
from ssmlx.commands.chat_settings import change_adapter
from ssmlx.loading import hub as hub_files
from ssmlx.loading.folders import Fetch
from ssmlx.loading.identity import stored_weights_digest
from ssmlx.loading.names import resolve_adapter

FIRST = "a" * 40
SECOND = "b" * 40
STREAMS = "streams.safetensors"
SETTINGS = "streams_config.json"
PICKLE = b"\x80\x04cos\nsystem\n(S'false'\ntR."


class Hub:
    """Repositories at commits, as the Hub's HTTP API has them; what it is asked is recorded."""

    def __init__(self) -> None:
        self.commits = {}
        self.branches = {"main": FIRST}
        self.asked = []
        self.sent = {}  # in place of what is listed, by file
        self.sizes = {}  # that are listed, in place of the files' own
        self.refusal = ()  # a status, and the code of an error
        self.failure = None  # of what is sent

    def listed(self, file: str, content: bytes) -> dict:
        size = self.sizes.get(file, len(content))
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        known = {"size": size, "blobId": blob, "oid": blob, "rfilename": file, "path": file}
        if file.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            known["lfs"] = {"size": size, "sha256": digest, "oid": digest, "pointerSize": 134}
        return {**known, "type": "file", "etag": known.get("lfs", known)["oid"]}

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
        if what:
            found = {"id": "org/name", "sha": commit, "siblings": known, "private": False}
            return 200, {}, json.dumps(known if "/tree/" in rest else found).encode()
        file = rest.split("/", 3)[3]
        headers = {"ETag": self.listed(file, files[file])["etag"], "X-Repo-Commit": commit}
        return 200, headers, self.sent.get(file, files[file])

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
    assert mentions(caplog.text, "org/name", FIRST)
    hub.branches["main"] = SECOND
    asked = len(hub.asked)
    for name in ("org/name", f"org/name@{FIRST}", "org/name@main"):
        assert resolve_adapter(name, Fetch(offline=True)) == found
    assert len(hub.asked) == asked
    newer = resolve_adapter(f"org/name@{SECOND}")
    assert newer.name == SECOND and (newer / "figures.json").is_file()
    (found / STREAMS).unlink()  # as where a download was interrupted
    line = refusal(resolve_adapter, f"org/name@{FIRST}", Fetch(offline=True))
    assert mentions(line, "org/name", "offline")
    assert snapshot(resolve_adapter(f"org/name@{FIRST}")) == snapshot(adapter)
    own = resolve_adapter("org/name", Fetch(cache_dir=tmp_path / "own"))
    assert own.name == SECOND and own.is_relative_to(tmp_path / "own" / "hub")
    # What is here goes first.
    shutil.copytree(adapter, tmp_path / "org" / "name")
    assert resolve_adapter("org/name") == Path("org/name")
    assert resolve_adapter("org/other") == Path("org/other")


def test_lora_of_mlx_lm_is_taken_from_the_hub(hub, base, tmp_path):
    lora = write_lora(tmp_path / "lora", base)
    files = {path.name: path.read_bytes() for path in lora.iterdir()}
    hub.commits[FIRST] = files | {"adapter_model.bin": PICKLE, "0000100_adapters.safetensors": b""}
    found = resolve_adapter("org/name")
    assert hub.fetched == files.keys() == {path.name for path in found.iterdir()}
    asked = len(hub.asked)
    assert ssmlx.load(base, adapter="org/name")[0].is_fine_tuned
    assert len(hub.asked) == asked
    del hub.commits[FIRST]["adapters.safetensors"]  # a pickle alone
    said = refusal(ssmlx.load, base, adapter="org/name", cache_dir=tmp_path / "own")
    assert "adapters.safetensors" in found_in(said)


def test_load_swap_and_engine_take_it(hub, base, adapter):
    expected, _ = answer(*ssmlx.load(base, adapter=adapter), "w1 w2", max_tokens=9)
    model, tokenizer = ssmlx.load(base, adapter="org/name")
    assert answer(model, tokenizer, "w1 w2", max_tokens=9)[0] == expected
    plain, _ = ssmlx.load(base, offline=True)
    assert ssmlx.swap_adapter(plain, f"org/name@{FIRST}").num_streams == model.num_streams
    talk = Chat(ssmlx.ChatSession(plain, tokenizer), Screen(), None)
    assert mentions(change_adapter("org/name", talk), "org/name", "2")
    hub.commits[SECOND] = hub.commits[FIRST]
    assert mentions(refusal(ssmlx.swap_adapter, plain, f"org/name@{SECOND}"), "offline")
    with ssmlx.Engine(base, ["org/name"]) as engine:
        assert engine.adapters == ["none", "org/name"]


def test_another_base_is_refused_by_both_names(hub, base, tmp_path):
    other = write_base(tmp_path / "other", seed=1, norm=2.0)
    message = refusal(ssmlx.load, other, adapter="org/name")
    assert mentions(message, "norm", str(other))


@pytest.mark.parametrize(("file", "size"), [
    (STREAMS, 2**30 + 1), (SETTINGS, 2**20 + 1), ("figures.json", None), (STREAMS, -1)
])  # fmt: skip
def test_what_is_too_large_is_not_fetched(hub, file, size):
    hub.commits[FIRST].setdefault(file, b"{}")
    hub.sizes[file] = size
    assert mentions(found_in(refusal(resolve_adapter, "org/name")), "org/name", file)
    assert hub.fetched == set()
    hub.sizes = dict.fromkeys((STREAMS, "adapters.safetensors"), 2**30)
    line = found_in(refusal(resolve_adapter, "org/name"))
    assert mentions(line, "org/name") and "2147" in line
    assert hub.fetched == set()


@pytest.mark.parametrize("file", [STREAMS, SETTINGS])
def test_what_is_not_what_was_listed_is_not_kept(hub, file, monkeypatch):
    content = hub.commits[FIRST][file]
    for sent in (content[:-1] + b"?", content + b"?", content[:-1]):
        hub.sent = {file: sent}
        assert file in refusal(resolve_adapter, "org/name")
        assert file not in refusal(resolve_adapter, "org/name", Fetch(offline=True))
    with monkeypatch.context() as patch:
        patch.setattr(hub_files, "_MOST_IN_ALL", sum(map(len, hub.commits[FIRST].values())) + 1)
        hub.sent = {file: content + bytes(2**20)}
        assert "org/name" in refusal(resolve_adapter, "org/name")
    hub.sent = {}
    assert snapshot(resolve_adapter("org/name")) == hub.commits[FIRST]


def test_a_hub_that_has_none_is_named_in_one_line(hub, monkeypatch):
    kinds = []
    for refused in (
        ((403, "GatedRepo"), (401, "GatedRepo")),
        ((401, "RepoNotFound"), (404, "RepoNotFound")),
        ((403, ""),),
        ((500, ""),),
    ):
        lines = set()
        for hub.refusal in refused:
            lines.add(refusal(resolve_adapter, "org/name"))
        (line,) = lines
        assert mentions(line, "org/name", "Hugging Face")
        kinds.append(line)
    assert len({*kinds}) == len(kinds)  # each says something else
    hub.refusal = ()
    assert mentions(refusal(resolve_adapter, "org/name@v9"), "org/name", "'v9'")
    hub.branches["v9"] = "../../x"
    hub.commits["../../x"] = hub.commits[FIRST]
    assert "'../../x'" in refusal(resolve_adapter, "org/name@v9")
    for name in ("org/name@../x", "org/..", "org/name@/etc/x"):
        assert resolve_adapter(name) == Path(name)
    hub.commits[FIRST] = {"model.safetensors": b""}
    assert mentions(found_in(refusal(resolve_adapter, "org/name")), "streams_config.json")
    assert hub.fetched == set()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert mentions(refusal(resolve_adapter, "org/name"), "org/name", "Hugging Face")


FIGURES = {
    "base": {"model": "org/base", "revision": SECOND, "bits": 4},
    "recipe": {"command": f"python -m ssmlx.adapt --model {Path.home()}/base | tee", "version": "1",
               "steps": 12, "seconds": 3.25, "train": {"batch_size": 8}},
    "data": {"private": False, "answers": 7, "tokens": 99, "sha256": "0f",
             "sources": {"shipped prompts": 6, "own questions": 1, "your files": 0}},
    "figures": {"prompts": 2, "max_tokens": 64, "plain_tokens_per_call": 1.0,
                "tokens_per_call": {"5": 1.43, "6": 1.5, "16": 1.625},
                "lookup_tokens_per_call": 1.125, "untrained_tokens_per_call": 1.0625},
}  # fmt: skip


@pytest.fixture
def send(hub, adapter, monkeypatch, capsys, tmp_path):
    """Upload the adapter, with what is written beside it; gives (exit code, stdout, stderr)."""
    made = tmp_path / "made"
    shutil.copytree(adapter, made)

    class Api(HfApi):
        def create_repo(self, repo, **options):
            hub.asked.append(options)

        def upload_folder(self, *, repo_id, folder_path, delete_patterns, **options):
            if isinstance(hub.failure, BaseException):
                raise hub.failure
            files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            spare = {*hub.commits[FIRST]} & {*delete_patterns} - {*files}
            hub.deleted = sorted(spare)
            hub.commits[SECOND] = files
            return SimpleNamespace(oid=SECOND)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)

    def send(*options, figures=FIGURES):
        (made / "figures.json").write_text(json.dumps(figures))
        if figures is None:
            (made / "figures.json").unlink()
        before = snapshot(made)
        code = exit_code(upload.main, "--adapter", made, "--repo", "org/name", *options)
        assert snapshot(made) == before
        return code, *capsys.readouterr()

    return send


def test_an_adapter_goes_there_and_comes_back(hub, send, base, adapter, tmp_path):
    spare = ("stream_adapters.safetensors", "optimizer.safetensors", "data.json", "train.jsonl")
    hub.commits[FIRST] = dict.fromkeys((".gitattributes", SETTINGS, *spare), b"old")
    for name in (*spare, "prompts.jsonl", "README.md"):
        (tmp_path / "made" / name).write_text("secret")
    code, out, err = send("--license", "mit")
    assert code == 0, err
    sent = hub.commits[SECOND]
    assert {*sent} == {*snapshot(adapter), "figures.json", "README.md"}
    assert "secret" not in str(sent) and hub.deleted == ["stream_adapters.safetensors"]
    assert all(f"{len(content):14,}  {file}\n" in out for file, content in sent.items())
    assert out.endswith(f"--adapter org/name@{SECOND}\n")
    told = sent["README.md"].decode()
    assert 'license: "mit"' in told and 'base_model: "org/base"' in told
    assert "| 5: 1.43, 6: 1.5, 16: 1.625 |" in told and "--model ~/base \\| tee |" in told
    figures = json.loads(sent["figures.json"])
    assert figures["figures"] == FIGURES["figures"] and str(Path.home()) not in str(sent)
    for value in (1.0625, 1.125, 3.25, 64, 99, "0f", SECOND):
        assert f" {value} |" in told
    found, expected = (ssmlx.load(base, adapter=one) for one in (f"org/name@{SECOND}", adapter))
    assert answer(*found, "w1", max_tokens=9)[0] == answer(*expected, "w1", max_tokens=9)[0]


def test_what_may_be_private_is_not_sent_unasked(hub, send):
    hub.commits[FIRST] = {}
    files = {**FIGURES["data"]["sources"], "your files": 1}
    for change in ({"private": True}, {"private": "no"}, {"sources": files}, {"sources": 1}, None):
        figures = None if change is None else {**FIGURES, "data": {**FIGURES["data"], **change}}
        code, out, err = send("--private", figures=figures)
        assert (code, out) == (2, "") and mentions(one_line(err, upload.PROG), "--yes-private")
        code, out, _ = send("--dry-run", figures=figures)
        assert code == 0 and mentions(out, "--yes-private")
    assert SECOND not in hub.commits and not any(isinstance(one, dict) for one in hub.asked)


def test_without_figures_the_card_has_none(hub, send):
    hub.commits[FIRST] = {}
    code, out, _ = send("--yes-private", "--base", "org/base", figures=None)
    assert code == 0 and "tokens per call" not in out


def test_of_the_figures_only_what_adapt_writes_is_sent(hub, send):
    hub.commits[FIRST] = {}
    code, out, _ = send(figures={**FIGURES, "examples": {"1": "secret"}})
    assert code == 0 and "secret" not in out
    assert {*json.loads(hub.commits[SECOND]["figures.json"])} == {*FIGURES}


def test_what_cannot_be_sent_is_one_line(hub, send):
    for there, failure, named in (
        ({"model.safetensors": b""}, None, "org/name"),
        ({"streams_config.json": b""}, None, "--private"),
        ({}, OSError("no\nroute"), "--private"),
    ):
        hub.commits[FIRST] = there
        hub.failure = failure
        code, _, err = send("--private")
        assert code == 2 and mentions(one_line(err, upload.PROG), named)
    code, _, err = send()
    assert code == 2 and mentions(err, "org/name", "no") and "route" not in err
    hub.failure = KeyboardInterrupt()
    assert send()[0] == 130 and SECOND not in hub.commits
    for name in ("org", "org/name@v1", "../name"):
        code, _, err = send("--repo", name)
        assert code == 2 and mentions(found_in(err), "--repo", name)


def test_an_adapter_of_a_folder_s_model_names_its_base_or_is_not_sent(hub, send, tmp_path):
    hub.commits[FIRST] = {}
    for local in (f"{tmp_path}/base", "my-model", "~/base", ""):
        figures = {**FIGURES, "base": {**FIGURES["base"], "model": local}}
        code, out, err = send(figures=figures)
        assert (code, out) == (2, "") and mentions(one_line(err, upload.PROG), "--base")
        code, out, _ = send("--dry-run", figures=figures)
        assert code == 0 and mentions(out, "--base")
    assert SECOND not in hub.commits
    code, _, err = send("--base", "./here", figures=figures)
    assert code == 2 and mentions(err, "--base", "./here")
    code, _, err = send("--base", "org/other", figures=figures)
    assert code == 0 and mentions(err, "org/other")
    sent = {
        name: content.decode()
        for name, content in hub.commits[SECOND].items()
        if name.endswith((".json", ".md"))
    }
    assert 'base_model: "org/other"' in sent["README.md"]
    assert "--model org/other --adapter org/name" in sent["README.md"]
    assert json.loads(sent["figures.json"])["base"]["model"] == "org/other"
    assert json.loads(sent[SETTINGS])["base_model"] == "org/other"


def test_a_base_that_is_here_must_have_the_adapter_s_weights(hub, send, base, monkeypatch):
    hub.commits[FIRST] = {}
    monkeypatch.setattr(upload, "resolve_model", lambda *_: base)
    local = {**FIGURES["base"], "model": str(base)}
    found = stored_weights_digest(base)
    for digest, code in ((found, 0), (found[:-1] + "x", 2), ("0f" * 16, 0), (None, 0)):
        figures = {**FIGURES, "base": {**local, "weights": digest}}
        status, _, err = send("--base", "org/other", figures=figures)
        assert status == code
        assert mentions(err, "org/other") == (code == 2)
        assert bool(err) == (code == 2 or digest == "0f" * 16)  # not compared
