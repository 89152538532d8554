"""Heads that draft for a published model: which is a model's, and which is on this machine."""

import io
import json
import logging
import multiprocessing
import re
import shutil
from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from real import answer, write_tokenizer
from refusals import exit_code, mentions, refusal
from tiny import make_tokenizer
from tiny_classes import PROMPT, VOCAB, random_weights, write_model
from tiny_families import CHAINS, make_base
from tiny_gemma import TARGETS, make_target, write_assistant

import ssmlx
from ssmlx.commands import chat, check, drafting, generate
from ssmlx.drafters.mtp_head import MtpModule
from ssmlx.errors import InputError
from ssmlx.generation.default_head import default_head
from ssmlx.generation.plan import make_plan
from ssmlx.loading import model_heads
from ssmlx.loading.hub import HUB_NAME
from ssmlx.loading.known_heads import KNOWN_HEADS, OWN_HEAD_FAMILIES
from ssmlx.loading.load import load_base
from ssmlx.loading.model_heads import OWN_HEAD, find_known_heads, find_local_head
from ssmlx.model.backbone import Backbone, Origin
from ssmlx.model.streams import StreamFusedModel

FIRST = "a" * 40
SECOND = "b" * 40
ROW = replace(
    KNOWN_HEADS[0],
    model="Tiny3.8",
    families=("qwen3_5",),
    hidden_size=32,
    num_layers=4,
    vocab_size=VOCAB,
    generation="",
    repositories=("org/Tiny-MTP-4bit", "org/Tiny-MTP-bf16"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny model with recurrent layers, of a class that heads are made for."""
    folder = write_model("qwen3_5", tmp_path_factory.mktemp("target") / "model")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def backbone(target):
    return load_base(target, "float32")[0]


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """An empty Hub cache; the table has a row for the tiny model, and no connection is made."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", (ROW,))
    return tmp_path / "hub"


def keep(hub, name, files, commit=FIRST, ref="main"):
    """Put files into a Hub cache as the Hub's client does: blobs, links to them, and a ref."""
    root = hub / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    (root / "blobs").mkdir(exist_ok=True)
    for file, content in files.items():
        blob = root / "blobs" / f"{commit[0]}-{file}"
        blob.write_bytes(content)
        (folder / file).symlink_to(blob)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    return folder


WHOLE = {"config.json": b"{}", "model.safetensors": b""}


def named(name, folder=None, **sizes):
    """What `find_known_heads` asks of a backbone; Qwen3.8-27B's sizes unless some are given."""
    row = KNOWN_HEADS[0]
    found = {"hidden_size": row.hidden_size, "vocab_size": row.vocab_size, **sizes}
    layers = [None] * found.pop("num_layers", row.num_layers)
    family = found.pop("family", "qwen3_5")
    model = type("Model", (), {"__module__": f"mlx_lm.models.{family}"})()
    origin = Origin(name=name, folder=folder)
    return SimpleNamespace(model=model, origin=origin, layers=layers, **found)


# --- whose head it is ---


def test_the_table_is_whole_and_tells_its_rows_apart():
    for row in KNOWN_HEADS:
        assert row.repositories and row.licence and row.families
        assert all(HUB_NAME.fullmatch(name) for name in row.repositories)
    told = [
        (family, row.hidden_size, row.num_layers, row.vocab_size, row.generation)
        for row in KNOWN_HEADS
        for family in row.families
    ]
    assert len(set(told)) == len(told)
    repositories = [name for row in KNOWN_HEADS for name in row.repositories]
    assert len(set(repositories)) == len(repositories)


def test_sizes_and_the_generation_in_a_name_tell_the_row(monkeypatch, tmp_path):
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", KNOWN_HEADS)
    snapshot = tmp_path / "models--lmstudio-community--Qwen3.6-27B-MLX-8bit" / "snapshots" / FIRST
    for backbone, expected in (
        (named("mlx-community/Qwen3.8-27B-4bit"), ["Qwen3.8-27B"]),
        (named("someone/Qwen-3.8-27b-mxfp4"), ["Qwen3.8-27B"]),
        (named("/models/x", tmp_path / "qwen3.6_27b"), ["Qwen3.6-27B"]),
        (named(str(snapshot), snapshot), ["Qwen3.6-27B"]),
        # It has these sizes, and no head that is known.
        (named("mlx-community/Qwen3.5-27B-4bit"), []),
        # Nothing says which.
        (named("mine"), ["Qwen3.8-27B", "Qwen3.6-27B"]),
        (named("Qwen3.8-27B", hidden_size=5121), []),
        (named("Qwen3.8-27B", num_layers=63), []),
        (named("Qwen3.8-27B", vocab_size=248_077), []),
        (named("Qwen3.8-27B", family="qwen3_next"), []),
        # Sizes that one model alone has need no name.
        (named("mine", hidden_size=2560, num_layers=32), ["Qwen3.5-4B"]),
        (
            named("x", hidden_size=2560, num_layers=42, vocab_size=262_144, family="gemma4"),
            ["Gemma 4 E4B"],
        ),
    ):
        assert [row.model for row in find_known_heads(backbone)] == expected


def test_a_quantised_copy_under_another_name_is_the_same_model(target):
    assert find_known_heads(load_base(target, "float32")[0]) == (ROW,)
    packed = Backbone(make_base("qwen3_5", bits=4))
    packed.name = "another"
    assert find_known_heads(packed) == (ROW,)


# --- what is here ---


def test_a_head_is_taken_from_the_cache_where_it_is_whole(hub, backbone, tmp_path):
    second = ROW.repositories[1]
    assert find_local_head(backbone) is None
    folder = keep(hub, second, WHOLE)
    assert find_local_head(backbone) == model_heads.LocalHead(second, folder)
    # The first of the row goes before the others.
    first = keep(hub, ROW.repositories[0], WHOLE)
    assert find_local_head(backbone).folder == first
    # The app's own folder, where the model was loaded with one.
    backbone.origin = replace(backbone.origin, cache_dir=tmp_path / "app")
    assert find_local_head(backbone) is None
    own = keep(tmp_path / "app" / "hub", second, WHOLE)
    assert find_local_head(backbone).folder == own


def test_half_a_cache_is_none(hub, backbone):
    name = ROW.repositories[0]
    folder = keep(hub, name, {"config.json": b"{}"})  # its weights are not here yet
    assert find_local_head(backbone) is None
    weights = folder / "model.safetensors"
    weights.symlink_to(hub / "gone")  # another process deletes it
    assert find_local_head(backbone) is None
    weights.unlink()
    keep(hub, name, {"model.safetensors": b""})
    assert find_local_head(backbone).folder == folder
    index = {"weight_map": {"fc.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_local_head(backbone) is None
    (folder / "model.safetensors.index.json").write_text("{")
    assert find_local_head(backbone) is None
    shutil.rmtree(hub)
    assert find_local_head(backbone) is None


def test_of_two_revisions_it_is_the_one_that_main_meant_last(hub, backbone):
    name = ROW.repositories[0]
    first = keep(hub, name, WHOLE)
    second = keep(hub, name, {"config.json": b"{}"}, SECOND, ref="v2")
    assert find_local_head(backbone).folder == first
    (second.parents[1] / "refs" / "main").write_text(SECOND)
    assert find_local_head(backbone) is None  # half of it is here
    keep(hub, name, {"model.safetensors": b""}, SECOND)
    assert find_local_head(backbone).folder == second


def test_which_of_several_models_it_is_must_be_known(hub, backbone, monkeypatch):
    rows = [
        replace(ROW, model=name, generation=name, repositories=(f"org/{name}",))
        for name in ("qwen3.6", "qwen3.8")
    ]
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", tuple(rows))
    for row in rows:
        keep(hub, row.repositories[0], WHOLE)
    assert find_local_head(backbone) is None
    backbone.origin = replace(backbone.origin, name="org/Qwen3.6-Tiny")
    assert find_local_head(backbone).name == "org/qwen3.6"


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
def test_tensors_among_the_model_s_own_come_first(hub, backbone, tmp_path, prefix):
    keep(hub, ROW.repositories[0], WHOLE)
    folder = tmp_path / "own"
    backbone.origin = replace(backbone.origin, folder=folder)
    folder.mkdir()
    file = str(folder / "model-00001-of-00002.safetensors")
    mx.save_safetensors(file, {"model.layers.0.mtps.weight": mx.zeros(1)})
    assert find_local_head(backbone).name == ROW.repositories[0]
    mx.save_safetensors(str(folder / "mtp.safetensors"), {f"{prefix}fc.weight": mx.zeros(1)})
    assert find_local_head(backbone) == model_heads.LocalHead(OWN_HEAD, None)
    (folder / "mtp.safetensors").write_bytes(b"12")
    assert find_local_head(backbone).name == ROW.repositories[0]


# --- it drafts ---

LENGTH = 40
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}


def head_tensors(backbone):
    """A random head of a model, as MLX's conversions store it."""
    module = MtpModule(backbone.args, type(backbone.layers[0]))
    return random_weights(module)


def head_files(backbone, tmp_path, **changes):
    """The files of a head's folder as mlx-vlm writes them, which the Hub has.

    Args:
        changes: of the inner settings.
    """
    mx.save_safetensors(str(tmp_path / "head.safetensors"), head_tensors(backbone))
    family = type(backbone.model).__module__.rpartition(".")[2]
    inner = {"model_type": f"{family}_text", "hidden_size": 32, "vocab_size": VOCAB, **changes}
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": inner}
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": (tmp_path / "head.safetensors").read_bytes(),
    }


@pytest.fixture
def kept(hub, backbone, tmp_path):
    """The folder of a whole head in the Hub's cache."""
    return keep(hub, ROW.repositories[0], head_files(backbone, tmp_path))


def lines_of(model, **settings):
    return drafting.describe(model, make_plan(model, **settings), "none").lines()


def decoded(model, **settings):
    """Tokens of an answer, and what drafted for it."""
    plan = make_plan(model, **settings)
    tokens, _ = answer(
        model, make_tokenizer(VOCAB), PROMPT, max_tokens=LENGTH, deterministic=True, **settings
    )
    return tokens, plan.kind


def test_a_head_in_the_cache_drafts_beside_the_text(target, kept):
    model, tokenizer = ssmlx.load(target, dtype="float32")
    assert make_plan(model).kind == "mtp"
    for drafter, drafts in ((None, "mtp"), ("mtp", "mtp"), ("prompt-lookup", "prompt-lookup")):
        config = ssmlx.GenerateConfig(drafter=drafter)
        assert ssmlx.ChatSession(model, tokenizer, config).drafter == drafts
    assert [one.largest.drafter for one in make_plan(model).drafters] == ["mtp", "prompt-lookup"]
    for sampling in ({}, SAMPLED):
        expected, kind = decoded(model, decoding="plain", **sampling)
        assert kind is None
        assert decoded(model, **sampling) == (expected, "mtp")
        # The ways off are what they were.
        assert decoded(model, drafter="prompt-lookup", **sampling) == (expected, "prompt-lookup")
    first, second = lines_of(model)
    assert mentions(first, ROW.repositories[0], "mtp") and "python -m" not in second
    _, second = lines_of(model, decoding="plain")
    assert mentions(second, "--decoding")


@pytest.mark.slow
def test_it_is_loaded_once_and_shared(target, kept):
    model, _ = ssmlx.load(target, dtype="float32")
    head = default_head(model).loaded
    assert head is not None and default_head(model).loaded is head
    copy = StreamFusedModel(model.backbone.clone_sharing_weights())
    assert default_head(copy).loaded is head
    with ssmlx.Engine(str(target), dtype="float32") as engine:
        assert make_plan(engine.model()).kind == "mtp"
        first, second = (
            [
                token
                for one in engine.stream(PROMPT, max_tokens=LENGTH, **how)
                for token in one.tokens
            ]
            for how in ({}, {"decoding": "plain"})
        )
        assert first == second
    shutil.rmtree(kept)  # another process deletes it: what was read stays
    expected, _ = decoded(model, decoding="plain")
    assert decoded(model) == (expected, "mtp")
    assert default_head(ssmlx.load(target, dtype="float32")[0]).found is None


@pytest.mark.slow
def test_two_sessions_and_a_cancelled_answer_share_it(target, kept):
    model, tokenizer = ssmlx.load(target, dtype="float32")

    def talk(decoding):
        """The tokens of two sessions whose replies are read in turns, call by call."""
        config = ssmlx.GenerateConfig(max_tokens=24, decoding=decoding)
        sessions = [ssmlx.ChatSession(model, tokenizer, config) for _ in range(2)]
        said = [[], []]
        for turns in (("w1 w2", "w9 w8 w7"), ("w3", "w4 w4")):
            replies = [one.reply(turn) for one, turn in zip(sessions, turns, strict=True)]
            for segments in zip_longest(*replies):
                for tokens, segment in zip(said, segments, strict=True):
                    tokens += segment.tokens if segment else []
        return said

    expected = talk("plain")
    assert talk(None) == expected
    with ssmlx.stream_generate(model, tokenizer, PROMPT, max_tokens=99) as stopped:
        next(stopped)
        stopped.cancel()
    assert talk(None) == expected and default_head(model).loaded is not None


def test_the_model_s_own_head_drafts(target, hub, backbone, tmp_path):
    folder = shutil.copytree(target, tmp_path / "own")
    own = {f"mtp.{name}": tensor for name, tensor in head_tensors(backbone).items()}
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), own)
    model, _ = ssmlx.load(folder, dtype="float32")
    expected, _ = decoded(model, decoding="plain")
    assert decoded(model) == (expected, "mtp")
    assert decoded(model, drafter="mtp") == (expected, "mtp")  # by its name alone
    assert lines_of(model)[0].startswith(f"{OWN_HEAD}: mtp")
    one_shape = make_plan(model, drafter="mtp", decoding="speculative")
    assert one_shape.loaded == [default_head(model).loaded]


@pytest.mark.parametrize(
    "broken",
    [
        {"settings": {"hidden_size": 33}},
        {"settings": {"model_type": "qwen3_next"}},
        {"settings": {"vocab_size": 65}},
        {"weights": b"12"},
        {"weights": None},
    ],
    ids=["width", "type", "vocabulary", "cut", "nan"],
)
def test_a_head_that_does_not_fit_drafts_nothing_and_says_so(
    target, hub, backbone, tmp_path, caplog, broken
):
    files = head_files(backbone, tmp_path, **broken.get("settings", {}))
    if "weights" in broken:
        content = broken["weights"]
        if content is None:
            tensors = {**head_tensors(backbone), "norm.weight": mx.full(32, mx.nan)}
            mx.save_safetensors(str(tmp_path / "nan.safetensors"), tensors)
            content = (tmp_path / "nan.safetensors").read_bytes()
        files["model.safetensors"] = content
    keep(hub, ROW.repositories[0], files)
    model, _ = ssmlx.load(target, dtype="float32")
    with caplog.at_level(logging.INFO, logger="ssmlx"):
        assert make_plan(model).kind == make_plan(model).kind == "prompt-lookup"
    assert caplog.text.count(ROW.repositories[0]) == 1
    first, second = lines_of(model)
    assert mentions(first, ROW.repositories[0]) and "\n" not in first
    assert "python -m ssmlx.chat --model" in second
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            make_plan(model, drafter="mtp")
        assert str(refused.value) == default_head(model).reason, "who names it is told why"


def test_an_assistant_in_the_cache_drafts_for_gemma_4(hub, tmp_path, monkeypatch):
    settings = {**TARGETS["small"], "vocab_size": VOCAB}
    folder = tmp_path / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    weights = dict(tree_flatten(make_target("small").backbone.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(folder)
    row = replace(ROW, families=("gemma4", "gemma4_text"), num_layers=6)
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", (row,))
    assistant = write_assistant(tmp_path / "assistant")
    keep(hub, row.repositories[0], {file.name: file.read_bytes() for file in assistant.iterdir()})
    model, _ = ssmlx.load(folder, dtype="float32")
    expected, _ = decoded(model, decoding="plain")
    assert decoded(model) == (expected, "mtp")
    assert mentions(lines_of(model)[0], row.repositories[0])


# --- what is said where it is not here ---


def test_the_command_that_fetches_it_is_given_and_nothing_is_fetched(target, capsys, monkeypatch):
    def refused(*args, **how):
        raise AssertionError("a connection")

    monkeypatch.setattr("socket.socket.connect", refused)
    command = f'python -m ssmlx.chat --model {target} --drafter "mtp model={ROW.repositories[0]}"'
    model, _ = ssmlx.load(target, dtype="float32")
    first, second = lines_of(model)
    assert ROW.repositories[0] not in first
    assert command in second and mentions(second, "Tiny3.8", "Apache-2.0")
    given = ("--model", target, "--dtype", "float32")
    assert exit_code(check.main, *given, "--seconds", 0.01) == 0
    shown = capsys.readouterr().out
    assert second in shown.splitlines()
    assert re.search(f'(?m)^mtp .*"mtp model={ROW.repositories[0]}"', shown)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert exit_code(chat.main, *given, "--max-tokens", 2) == 0
    *_, second = capsys.readouterr().err.splitlines()
    assert command in second


def test_the_commands_take_what_is_here(target, kept, capsys):
    given = ("--model", target, "--dtype", "float32", "--max-tokens", 8, "--prompt", "w1 w2")
    assert exit_code(generate.main, *given, "--verbose") == 0
    drafted = capsys.readouterr()
    assert mentions(drafted.err.splitlines()[0], ROW.repositories[0], "mtp")
    assert exit_code(generate.main, *given, "--decoding", "plain") == 0
    assert capsys.readouterr().out == drafted.out
    # By its name alone it is the same head.
    assert exit_code(generate.main, *given, "--drafter", "mtp") == 0
    assert capsys.readouterr().out == drafted.out
    assert exit_code(check.main, *given[:4], "--seconds", 0.01, "--json") == 0
    assert json.loads(capsys.readouterr().out)["drafters"]["mtp"] is None


def test_rows_of_several_models_are_all_named(backbone, monkeypatch):
    rows = [
        replace(ROW, model=name, generation=name.lower(), repositories=(f"org/{name}",))
        for name in ("Qwen3.6", "Qwen3.8")
    ]
    monkeypatch.setattr(model_heads, "KNOWN_HEADS", tuple(rows))
    _, second = lines_of(StreamFusedModel(backbone))
    older, newer = second.rsplit("python -m", 1)
    assert mentions(older, 'model=org/Qwen3.6"', "Qwen3.6")
    assert mentions(newer, 'model=org/Qwen3.8"', "Qwen3.8")


# --- other processes ---


def find_again_and_again(target, hub, ends, found):
    """In a process of its own: look for the head until told to end; send all that was seen."""
    constants.HF_HUB_CACHE = str(hub)
    model_heads.KNOWN_HEADS = (ROW,)
    backbone = load_base(target, "float32")[0]
    seen = set()
    found.send("ready")
    while not ends.is_set():
        head = find_local_head(backbone)
        seen.add(None if head is None else str(head.folder))
    found.send(seen)


@pytest.mark.slow
def test_another_process_may_fetch_and_delete_meanwhile(target, hub, backbone):
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    ours, theirs = context.Pipe()
    process = context.Process(target=find_again_and_again, args=(target, hub, ends, theirs))
    process.start()
    try:
        assert ours.recv() == "ready"
        for _ in range(20):
            keep(hub, ROW.repositories[0], {"config.json": b"{}"})
            folder = keep(hub, ROW.repositories[0], {"model.safetensors": b""})
            shutil.rmtree(hub)
        ends.set()
        assert ours.recv() <= {None, str(folder)}
    finally:
        ends.set()
        process.join()
    assert process.exitcode == 0


# --- the table of families ---


@pytest.mark.parametrize("name", [*CHAINS, "llama"])
def test_families_with_mtp_are_those_that_the_drafter_takes(name, tmp_path):
    """The cell MTP of the page of families is that of `OWN_HEAD_FAMILIES`."""
    model = StreamFusedModel(Backbone(make_base(name)))
    if name not in OWN_HEAD_FAMILIES:
        assert mentions(refusal(ssmlx.load_mtp, model), "--drafter mtp")
        return
    for file, content in head_files(model.backbone, tmp_path).items():
        (tmp_path / file).write_bytes(content)
    head = ssmlx.load_mtp(model, tmp_path)
    assert make_plan(model, drafter=head).kind == "mtp"
    expected, _ = decoded(model, decoding="plain")
    assert decoded(model, drafter=head)[0] == expected
