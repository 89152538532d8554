"""Adapters by name, alone and beside a task's LoRA, and exchanged on a base that is loaded."""

import gc
import io
import json
import shutil
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from loops import plain_tokens, speculative_steps
from mlx.utils import tree_flatten
from real import answer, fuse, make_adapter, said_later, write_base, write_tiny_adapter
from refusals import found_in, mentions, refusal
from tiny import first_tokens, make_base, make_lora, make_packed_base, make_tokenizer, slow
from tiny import make_adapter as tiny_adapter

import ssmlx
from ssmlx.commands import chat, generate
from ssmlx.drafters.stream_drafter import StreamDrafter
from ssmlx.errors import InputError
from ssmlx.loading import load as loading
from ssmlx.loading import names as naming
from ssmlx.loading.adapter import StreamAdapter, load_adapter, write_adapter
from ssmlx.loading.attach import attach_adapter, find_adapters_of_base
from ssmlx.loading.names import bundled_adapters, resolve_adapter
from ssmlx.model.backbone import Backbone
from ssmlx.model.lora import LoraWeights
from ssmlx.model.streams import StreamFusedModel
from ssmlx.settings import STREAM_SCHEDULES, TreeConfig

# --- swapping, on models in memory ---


LENGTH = 12
PROMPT = [1, 5, 2, 7]
MERGED = "merged"
APART = "apart"
PACKED = "packed"


def make_backbone(kind: str) -> Backbone:
    return Backbone(make_packed_base() if kind == PACKED else make_base())


def make(backbone: Backbone, scope: str, *, seed: int, num_streams: int = 3) -> StreamAdapter:
    """A random adapter; those of odd seeds have LoRA below the streams as well."""
    lora_from = 0 if seed % 2 else None
    return tiny_adapter(backbone, scope, seed=seed, lora_from=lora_from, num_streams=num_streams)


def make_adapters(backbone: Backbone) -> dict[str, StreamAdapter | None]:
    return {
        "all": make(backbone, "all", seed=1),
        "all 2": make(backbone, "all", seed=12, num_streams=2),
        "streams": make(backbone, "streams", seed=23),
        "streams 2": make(backbone, "streams", seed=34, num_streams=1),
        "none": None,
    }


def leaves(backbone: Backbone) -> dict[str, mx.array]:
    return dict(tree_flatten(backbone.model.parameters()))


def same_arrays(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """The very same arrays under the same names; equal copies do not count."""
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def answers(model: StreamFusedModel) -> tuple[list[int], int]:
    """The tokens of an answer, by streams if there are any, and how many target calls it took."""
    asked = {"decoding": "speculative" if model.num_streams else "plain", "max_tokens": LENGTH}
    tokens, last = answer(model, make_tokenizer(), PROMPT, **asked)
    return tokens, last.target_calls


def fresh(kind: str, adapter: StreamAdapter | None) -> StreamFusedModel:
    backbone = make_backbone(kind)
    if adapter is None:
        return StreamFusedModel(backbone)
    return attach_adapter(backbone, adapter, merge_lora=kind != APART)


@pytest.fixture(scope="module")
def expected():
    """What fresh models answer, by (kind, adapter)."""
    wanted = {}
    for kind in (MERGED, APART, PACKED):
        for name, adapter in make_adapters(make_backbone(kind)).items():
            model = fresh(kind, adapter)
            wanted[kind, name] = answers(model)
            assert wanted[kind, name][0] == plain_tokens(model, PROMPT, LENGTH)
    return wanted


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
@pytest.mark.parametrize("order", [
    ("all", "streams", "all", "none", "streams", "none"),
    ("streams", "all 2", "all", "all", "none", "none", "all 2"),
    ("none", "streams 2", "streams", "all"),
])  # fmt: skip
def test_every_swap_answers_as_a_fresh_load(expected, kind, order):
    backbone = make_backbone(kind)
    adapters = make_adapters(backbone)
    before = leaves(backbone)
    model = StreamFusedModel(backbone)
    for name in order:
        model = ssmlx.swap_adapter(model, adapters[name], merge_lora=kind != APART)
        assert answers(model) == expected[kind, name], name
        if name == "none":
            assert same_arrays(leaves(model.backbone), before)
    model = ssmlx.swap_adapter(model, None)
    assert same_arrays(leaves(model.backbone), before) and model.backbone.replaced == {}


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
@pytest.mark.parametrize("scope", ["all", "streams"])
def test_no_weight_is_copied(kind, scope):
    """Beside merged ones, every array is the base's own; and the base stays as it is."""
    backbone = make_backbone(kind)
    adapter = make(backbone, scope, seed=12)
    before = leaves(backbone)
    modules = dict(backbone.model.named_modules())
    merge = kind != APART and scope == "all"
    # Of the packed model, one matrix has a width that no packing takes.
    lora = adapter.trained_lora
    merged = {path for path in lora if merge and type(modules[path]) is nn.Linear}
    assert bool(merged) == merge and (merged == lora.keys()) == (merge and kind == MERGED)
    for _ in range(2):
        plain = StreamFusedModel(backbone)
        model = ssmlx.swap_adapter(plain, adapter, merge_lora=kind != APART)
        own = leaves(model.backbone)
        now = {name.replace(".linear.", "."): array for name, array in own.items()}
        for name, array in before.items():
            assert (now[name] is array) == (name.removesuffix(".weight") not in merged), name
        apart = lora.keys() - merged
        added = {f"{path}.{part}" for path in apart for part in ("lora_a", "lora_b")}
        assert now.keys() == before.keys() | added
        kept = {path: leaf for path, leaf in model.backbone.replaced_in_memory.items()}
        assert kept.keys() == lora.keys()
        assert all(kept[path].weight is modules[path].weight for path in kept)
        assert same_arrays(leaves(ssmlx.swap_adapter(model, "none").backbone), before)
        assert same_arrays(leaves(backbone), before)


BAD = {
    "another base": ("vocab_size", "13", "99"),
    "other weights": ("norm",),
    "no such module": ("model.layers.2.mlp.no_proj.lora_a",),
    "misshapen": ("model.layers.2.self_attn.q_proj.lora_a",),
    "not finite": ("model.layers.2.self_attn.q_proj.lora_b",),
    "unknown name": ("nothing-like-it",),
    "missing folder": ("no/such/folder",),
}
"""What the line that refuses an adapter names."""


def spoil(adapter: StreamAdapter, case: str) -> StreamAdapter | str:
    path = "model.layers.2.self_attn.q_proj"
    a = adapter.lora[path].a
    b = adapter.lora[path].b
    base = adapter.base
    changes = {
        "another base": lambda: {"base": replace(base, vocab_size=99)},
        "other weights": lambda: {"base": replace(base, norm_probe=base.norm_probe[:1])},
        "no such module": lambda: {"lora": {"model.layers.2.mlp.no_proj": LoraWeights(a, b, 1.0)}},
        "misshapen": lambda: {"lora": {path: LoraWeights(a[:5], b, 1.0)}},
        "not finite": lambda: {"lora": {path: LoraWeights(a, b / 0, 1.0)}},
    }
    if case in changes:
        return replace(adapter, **{"lora": {}, **changes[case]()})
    return {"unknown name": "nothing-like-it", "missing folder": "no/such/folder"}[case]


def test_an_adapters_settings_are_those_of_its_base():
    adapter = make(make_backbone(APART), "all", seed=12)
    said = refusal(replace, adapter, config=replace(adapter.config, num_layers=4))
    assert mentions(said, "4", "3", "32")


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize(("kind", "scope"), [(MERGED, "all"), (APART, "all"), (APART, "streams")])
def test_a_bad_adapter_leaves_the_model_as_it_was(case, kind, scope, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    backbone = make_backbone(kind)
    bad = spoil(make(backbone, "all", seed=12), case)
    good = make(backbone, scope, seed=1)
    model = ssmlx.swap_adapter(StreamFusedModel(backbone), good, merge_lora=kind == MERGED)
    held = leaves(model.backbone)
    said = answers(model)
    line = refusal(ssmlx.swap_adapter, model, bad, merge_lora=kind == MERGED)
    assert mentions(line, *BAD[case])
    assert same_arrays(leaves(model.backbone), held)
    assert answers(model) == said


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
def test_models_of_one_base_answer_in_turns(expected, kind):
    """A swap takes nothing from the model that it starts from, nor from an answer that is open."""
    backbone = make_backbone(kind)
    model = StreamFusedModel(backbone)
    models = {}
    for name, adapter in make_adapters(backbone).items():
        model = models[name] = ssmlx.swap_adapter(model, adapter, merge_lora=kind != APART)
    open_answers = {
        name: ssmlx.stream_generate(one, make_tokenizer(), PROMPT, max_tokens=LENGTH)
        for name, one in models.items()
    }
    tokens = {name: [] for name in models}
    while not all(one.is_over for one in open_answers.values()):
        for name, one in open_answers.items():
            tokens[name] += [token for segment in islice(one, 1) for token in segment.tokens]
    assert tokens == {name: expected[kind, name][0] for name in models}


@pytest.fixture(scope="module")
def shelf(base):
    """A folder of adapters as the package has one: three for `base`, one for another model."""
    shelf = base.parent / "shelf"
    write_tiny_adapter(shelf / "chat", base, scope="streams")
    write_tiny_adapter(shelf / "sql", base, template="w5 {prompt} w6")
    (shelf / "e2e").mkdir()
    adapter = make_adapter(base)
    lora = {path: replace(w, scale=-2.0 * w.scale) for path, w in adapter.lora.items()}
    write_adapter(shelf / "e2e", replace(adapter, lora=lora))  # it says other things
    other = write_base(base.parent / "other", seed=1, norm=1.5)
    write_tiny_adapter(shelf / "foreign", other)
    (shelf / "half-written").mkdir()
    (shelf / "notes.txt").touch()
    return shelf


@pytest.fixture(autouse=True)
def on_the_shelf(shelf, monkeypatch):
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (shelf,))


@pytest.fixture
def loads(monkeypatch):
    """How often a base was loaded."""
    real = loading.load_base
    seen = []

    def load_base(path, *options):
        seen.append(path)
        return real(path, *options)

    monkeypatch.setattr(loading, "load_base", load_base)
    return seen


def test_the_package_names_its_adapters(shelf, monkeypatch):
    names = ["chat", "e2e", "foreign", "sql"]
    assert bundled_adapters() == {name: shelf / name for name in names}
    assert ssmlx.bundled_adapters is bundled_adapters
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (shelf / "nowhere",))
    assert bundled_adapters() == {}


def test_what_ships_is_a_whole_adapter(monkeypatch):
    monkeypatch.undo()
    for folder in bundled_adapters().values():
        adapter = load_adapter(folder)
        assert adapter.base.model_type and (folder / "README.md").is_file()


def test_a_bare_name_is_a_folder_here_or_else_a_bundled_adapter(
    shelf, monkeypatch, tmp_path, capsys, caplog
):
    caplog.set_level("INFO", "ssmlx")
    monkeypatch.chdir(tmp_path)
    assert resolve_adapter("sql") == shelf / "sql"
    assert resolve_adapter(Path("sql")) == Path("sql")
    assert resolve_adapter("./sql") == Path("sql")
    assert resolve_adapter("none") is None and resolve_adapter("./none") == Path("none")
    assert resolve_adapter("some/far/where") == Path("some/far/where")
    assert resolve_adapter("~/x") == Path.home() / "x"
    assert resolve_adapter("~no-such-user-here/x") == Path("~no-such-user-here/x")
    (tmp_path / "sql").touch()
    assert resolve_adapter("sql") == shelf / "sql"
    (tmp_path / "mine").mkdir()
    assert resolve_adapter("mine") == Path("mine")
    assert capsys.readouterr() == ("", "")
    (tmp_path / "chat").mkdir()
    assert resolve_adapter("chat") == shelf / "chat"  # an empty folder is no adapter
    (tmp_path / "chat" / "streams_config.json").touch()
    assert resolve_adapter("chat") == Path("chat")
    (line,) = caplog.messages
    assert mentions(line, "chat")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["e2e", "dialogsum"])
def test_an_adapter_that_only_a_checkout_has_is_told_where_it_is(
    name, shelf, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (shelf / "nowhere",))
    assert mentions(refusal(resolve_adapter, name), name, f"examples/adapters/{name}")


def test_a_training_run_stands_for_its_adapter(shelf, tmp_path):
    shutil.copytree(shelf / "sql", tmp_path / "run" / "adapter")
    for run in (tmp_path / "run", str(tmp_path / "run")):
        assert resolve_adapter(run) == tmp_path / "run" / "adapter"
    shutil.copytree(shelf / "chat", tmp_path / "run", dirs_exist_ok=True)
    assert resolve_adapter(tmp_path / "run") == tmp_path / "run"  # it is one itself


@pytest.mark.parametrize("name", ["sqll", "notes.txt", "half-written", "", "SQL", "SQ\u200bL"])
def test_an_unknown_name_is_refused_with_those_that_there_are(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = refusal(resolve_adapter, name)
    shown = name.replace("\u200b", "\\u200b")  # what cannot be seen is spelt out
    assert shown in found_in(message)
    assert mentions(message, "chat", "e2e", "foreign", "sql", "--adapter")


def test_an_unknown_name_is_refused_before_the_model_is_looked_for(monkeypatch):
    def resolve_model(name):
        raise AssertionError("downloaded a model for an adapter that is not there")

    monkeypatch.setattr(loading, "resolve_model", resolve_model)
    assert mentions(refusal(ssmlx.load, "smollm2-135m", adapter="sqll"), "sqll")


def test_folders_and_names_are_swapped_without_loading_the_base_again(base, shelf, loads):
    names = ["sql", "chat", shelf / "e2e", None, "e2e", str(shelf / "chat"), "none"]
    wanted = {}
    for name in names:
        fresh, tokenizer = ssmlx.load(str(base), adapter=name, dtype="float32")
        wanted[name] = answer(fresh, tokenizer, PROMPT, max_tokens=LENGTH)[0]
    assert len({tuple(wanted[name]) for name in ("sql", "chat", "e2e")}) == 3
    loads.clear()
    model, tokenizer = ssmlx.load(str(base), adapter="e2e", dtype="float32")
    for name in names:
        model = ssmlx.swap_adapter(model, name)
        assert answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0] == wanted[name], name
    assert len(loads) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_merged_weights_are_in_memory_once_and_come_back_from_the_folder(base, shelf, dtype):
    fresh = leaves(ssmlx.load(str(base), adapter="none", dtype=dtype)[0].backbone)
    model, _ = ssmlx.load(str(base), adapter="sql", dtype=dtype)
    merged = leaves(model.backbone)
    replaced = model.backbone.replaced
    assert replaced and set(replaced.values()) == {None}
    assert {name.removesuffix(".weight") for name in fresh if not same(fresh, merged, name)} == set(
        replaced
    )
    back = leaves(ssmlx.swap_adapter(model, None).backbone)
    assert fresh.keys() == back.keys() and all(same(fresh, back, name) for name in fresh)


def same(left, right, name):
    return bool(mx.array_equal(left[name], right[name]))


def test_a_model_whose_folder_is_gone_keeps_its_adapter(base, shelf, tmp_path):
    folder = shutil.copytree(base, tmp_path / "moved")
    model, tokenizer = ssmlx.load(str(folder), adapter="sql", dtype="float32")
    before = answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0]
    shutil.rmtree(folder)
    for name in ("e2e", None):
        with pytest.raises(InputError):
            ssmlx.swap_adapter(model, name)
        assert answer(model, tokenizer, PROMPT, max_tokens=LENGTH)[0] == before


def test_a_fused_folder_without_its_streams_and_back(base, tmp_path):
    fused = fuse(base, tmp_path / "fused")
    model, tokenizer = ssmlx.load(str(fused), dtype="float32")
    assert model.num_streams == 2
    own = answer(model, tokenizer, PROMPT, max_tokens=LENGTH, deterministic=True)
    model = ssmlx.swap_adapter(model, None)
    plain = answer(model, tokenizer, PROMPT, max_tokens=LENGTH, deterministic=True)
    assert (plain[0], plain[1].target_calls) == (own[0], LENGTH)
    model = ssmlx.swap_adapter(model, fused)
    again = answer(model, tokenizer, PROMPT, max_tokens=LENGTH, deterministic=True)
    assert (again[0], again[1].target_calls) == (own[0], own[1].target_calls)
    assert ssmlx.load(str(fused), adapter="none", dtype="float32")[0].num_streams == 0


def test_adapters_of_a_model_are_known_from_their_settings_alone(base, shelf, monkeypatch, loads):
    model, _ = ssmlx.load(str(base), adapter="none", dtype="float32")
    copy = shutil.copytree(shelf, base.parent / "settings", dirs_exist_ok=True)
    for file in copy.glob("*/*.safetensors"):
        file.unlink()
    (copy / "e2e" / "streams_config.json").write_text("{")
    monkeypatch.setattr(naming, "ADAPTERS_FOLDERS", (copy,))
    assert list(find_adapters_of_base(model)) == ["chat", "sql"]
    assert len(loads) == 1
    shutil.rmtree(copy)


def chat_session(base, adapter=None, **settings):
    config = ssmlx.GenerateConfig(max_tokens=LENGTH, **settings)
    return ssmlx.ChatSession(*ssmlx.load(str(base), adapter=adapter, dtype="float32"), config)


def said(session, text) -> str:
    return "".join(response.text for response in session.reply(text))


@pytest.mark.parametrize("decoding", [None, pytest.param("plain", marks=pytest.mark.slow)])
def test_a_conversation_goes_on_under_another_adapter(base, loads, decoding):
    session = chat_session(base, "e2e", decoding=decoding)
    said(session, "w1 w2")
    for name, text in (("chat", "w3"), ("sql", "w4 w5"), (None, "w6")):
        reused = session.totals.reused_tokens
        messages = list(session.messages)
        session.swap_adapter(name)
        assert (session.messages, session.context_tokens) == (messages, 0)
        reply = said(session, text)
        assert session.totals.reused_tokens == reused  # nothing of another adapter's cache
        other = chat_session(base, name, decoding=decoding)
        other.messages = messages
        assert reply == said(other, text)
        assert session.compare().same_tokens if session.model.num_streams else True
        before = session.totals.reused_tokens
        said(session, "w8")
        assert session.totals.reused_tokens > before
    assert session.totals.answers == 7


def test_settings_that_the_next_adapter_cannot_follow_refuse_it(base, shelf, tmp_path):
    narrow = make_adapter(base)
    config = replace(narrow.config, num_streams=1)
    streams = replace(narrow.streams, embeddings=narrow.streams.embeddings[:1])
    write_adapter(tmp_path, replace(narrow, config=config, streams=streams))
    session = chat_session(base, "chat", num_streams=2)
    said(session, "w1 w2")
    held = session.context_tokens
    messages = list(session.messages)
    assert mentions(refusal(session.swap_adapter, tmp_path), "--num-streams", "2", "1")
    assert mentions(refusal(session.swap_adapter, "foreign"), "norm")
    assert (session.context_tokens, session.messages) == (held, messages)
    reused = session.totals.reused_tokens
    assert said(session, "w3")
    assert session.totals.reused_tokens > reused
    speculative = chat_session(base, "chat", decoding="speculative")
    assert mentions(found_in(refusal(speculative.swap_adapter, "none")), "streams")
    assert said(speculative, "w1 w2")


@pytest.fixture
def run(base, monkeypatch, capsys, tmp_path):
    """Pipe lines through the chat command; gives (code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(lines, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        command = ["--model", str(base), "--max-tokens", str(LENGTH), "--dtype", "float32"]
        code = chat.main([*command, *map(str, args)])
        return code, *capsys.readouterr()

    return run


def test_chat_drafts_with_the_chat_adapter_where_it_belongs(base, run, loads, shelf, tmp_path):
    (tmp_path / "chat").mkdir()  # whatever lies around
    code, out, err = run(["/set adapter", "w1 w2"])
    assert (code, out) == (0, said(chat_session(base, shelf / "chat"), "w1 w2") + "\n")
    assert len(loads) == 2  # one of the chat's, one of the line above
    name, current, available, quiet = said_later(err)
    assert any(mentions(line, "chat", "streams") for line in err.splitlines()[:2])
    assert "python -m ssmlx.adapt" in err
    assert mentions(name, "adapter", "chat") and mentions(current, "chat", "2")
    assert mentions(available, "chat", "e2e", "sql", "foreign", "/set")
    assert mentions(quiet, str(LENGTH))
    code, _, err = run([], "--adapter", "chat")  # which no empty folder is
    assert code == 0 and mentions(err, "chat")
    code, _, err = run([], "--adapter", "./chat")
    assert code == 2 and "chat/streams_config.json" in err


CURRENT = {
    "--adapter none": ["drafted"],
    "--adapter e2e": ["adapter e2e 2"],
    "--decoding plain": ["adapter chat --decoding"],
    "--model other": ["drafted", "foreign chat e2e sql"],
    "--model fused": ["streams 2 model"],
}
"""What the lines about the current adapter, and those that there are, name."""


@pytest.mark.parametrize("asked", [*[*CURRENT][:2], *slow(*[*CURRENT][2:])])
def test_what_was_asked_for_is_what_runs(base, run, shelf, tmp_path, asked):
    option, value = asked.split()
    models = {"other": shelf.parent / "other", "fused": tmp_path / "fused"}
    if value == "fused":
        fuse(base, models["fused"])
    code, _, err = run(["/set adapter"], option, models.get(value, value))
    assert code == 0
    for found, expected in zip(said_later(err)[1:], CURRENT[asked], strict=False):
        assert mentions(found, *expected.split())


def test_the_chat_swaps_and_goes_on(base, run, shelf, loads):
    lines = ["w1 w2", "/set adapter e2e", "w3", f"/set adapter {shelf / 'sql'} ", "w4"]
    lines += ["/set adapter " + "x" * 300, "/set adapter nonsense", "/set adapter foreign", "w5"]
    lines += ["/set adapter none", "w6", "/set adapter default"]
    code, out, err = run(lines)
    assert code == 0 and len(loads) == 1
    session = chat_session(base, "chat")
    texts = [said(session, "w1 w2")]
    for name, text in (("e2e", "w3"), ("sql", "w4")):
        session.swap_adapter(name)
        texts.append(said(session, text))
    texts.append(said(session, "w5"))
    session.swap_adapter(None)
    texts.append(said(session, "w6"))
    assert out == "".join(text + "\n" for text in texts)
    told = [line for line in said_later(err) if not line.startswith(("[", "/"))]
    e2e, sql, _, unknown, foreign, none, auto = told
    assert mentions(e2e, "e2e", "2") and mentions(sql, str(shelf / "sql"), "2")
    assert mentions(unknown, "nonsense", "chat", "e2e", "foreign", "sql")
    assert mentions(foreign, "norm") and not mentions(none, "2")
    assert mentions(auto, "chat", "2")  # what it began with


def test_generate_takes_what_a_chat_takes(base, capsys):
    ask = ["--model", str(base), "--prompt", "w1", "--verbose", "--max-tokens", "8"]
    for adapter in (None, "none", "chat"):
        more = ["--adapter", adapter] if adapter else []
        assert generate.main([*ask, *more]) == 0
        first, *_ = capsys.readouterr().err.splitlines()
        assert mentions(first, "chat") == (adapter != "none")


TREE = TreeConfig(kind="full", width=2)


def with_task(backbone, *, seed=4):
    """An adapter of scope "streams" with the LoRA of a task, on layers above and below."""
    task = make_lora(backbone.model, 0, seed + 9)
    return replace(make(backbone, "streams", seed=seed), lora=task)


def plain(model):
    return plain_tokens(model, PROMPT, LENGTH)


def streamed(model, schedule):
    drafter = StreamDrafter(model, TREE, model.num_streams, schedule)
    return first_tokens(speculative_steps(model, PROMPT, [drafter]), LENGTH)


@pytest.mark.parametrize("kind", [MERGED, APART, PACKED])
def test_answers_are_those_of_the_tasks_lora_alone(kind):
    backbone = make_backbone(kind)
    adapter = with_task(backbone)
    alone = replace(make(backbone, "all", seed=4), lora=adapter.task_lora)
    expected = plain(attach_adapter(backbone, alone, merge_lora=kind == MERGED))
    untouched = plain(attach_adapter(backbone, replace(adapter, lora={}), merge_lora=False))
    assert untouched != expected
    model = attach_adapter(backbone, adapter, merge_lora=kind == MERGED)
    assert model.is_fine_tuned
    assert plain(model) == expected
    lengths = {}
    for schedule in STREAM_SCHEDULES:
        tokens, lengths[schedule] = streamed(model, schedule)
        assert tokens == expected
    assert lengths["fused"] == lengths["second-pass"]


def test_a_folder_holds_both_and_mlx_lm_finds_the_tasks(tmp_path):
    backbone = make_backbone(MERGED)
    adapter = with_task(backbone)
    write_adapter(tmp_path, adapter)
    again = load_adapter(tmp_path)
    for mine, theirs in ((adapter.lora, again.lora), (adapter.stream_lora, again.stream_lora)):
        assert mine.keys() == theirs.keys()
        for path, weights in mine.items():
            assert weights.scale == theirs[path].scale
            assert mx.array_equal(weights.a, theirs[path].a)
            assert mx.array_equal(weights.b, theirs[path].b)
    mlx_lm_file = mx.load(str(tmp_path / "adapters.safetensors"))
    path = next(iter(adapter.task_lora))
    assert mx.array_equal(mlx_lm_file[f"{path}.lora_a"], adapter.task_lora[path].a)


def test_a_task_beside_lora_on_every_row_is_refused(tmp_path):
    backbone = make_backbone(MERGED)
    write_adapter(tmp_path, make(backbone, "all", seed=4))
    file = tmp_path / "streams_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_lora_scale": 2.0}))
    assert mentions(found_in(refusal(load_adapter, tmp_path)), "task_lora_scale", "'all'")


def test_a_lora_without_weights_is_refused(tmp_path):
    settings = {"fine_tune_type": "lora", "lora_parameters": {"scale": 2.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {})
    assert mentions(refusal(load_adapter, tmp_path), str(tmp_path), "LoRA")


def test_what_an_adapter_replaces_is_freed_at_once():
    """Not only when the collector comes by: merged weights are as large as the model's."""
    backbone = make_backbone(MERGED)
    adapters = make_adapters(backbone)
    model = StreamFusedModel(backbone)
    gc.collect()
    gc.disable()
    try:
        for adapter in adapters.values():
            model = ssmlx.swap_adapter(model, adapter)
        held = mx.get_active_memory()
        gc.collect()
        assert mx.get_active_memory() == held
    finally:
        gc.enable()
