"""LoRA and DoRA of mlx-lm's: loaded as mlx-lm loads them, swapped, served, and refused."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_families
from mlx.utils import tree_flatten
from mlx_lm import fuse
from mlx_lm import lora as mlx_lora
from mlx_lm.utils import save_config, save_model
from real import answer, make_adapter, write_data, write_packed, write_tokenizer
from refusals import exit_code, exits, mentions, refusal
from tiny import all_pairs, assert_close, mlx_lm_tokens
from tiny_lora import FILE, SETTINGS, TOKENS, logits, write_lora, write_pefts

import ssmlx
from ssmlx.commands import check, generate
from ssmlx.commands.chat_answers import Chat
from ssmlx.commands.chat_screen import Screen
from ssmlx.commands.chat_settings import change_adapter
from ssmlx.loading.adapter import Adapter, load_adapter, load_stream_adapter, write_adapter
from ssmlx.loading.attach import attach_adapter
from ssmlx.loading.load import load_base
from ssmlx.loading.lora_files import unify_rank_and_scale
from ssmlx.model.lora import EmbeddingLora, ExpertsLora, LoraLayer, RowLora

LENGTH = 12
TOLERANCE = 2e-5
"""Of logits, relative to the largest: LoRA is merged here, and applied beside the weights there."""
FAMILIES = ["llama", "qwen2", "gemma3_text", "phi3", "qwen3_moe"]


def write_family(folder, name, bits=None, tied=None):
    """A random model of mlx-lm's class with a tokenizer."""
    tied = (name in ("qwen2", "gemma3_text")) if tied is None else tied
    settings = {**tiny_families.SIZES, **{**tiny_families.FAMILIES, **tiny_families.CHAINS}[name]}
    folder.mkdir(parents=True)
    save_model(folder, tiny_families.make_base(name, tied, bits))
    settings |= {"model_type": name, "tie_word_embeddings": tied, "eos_token_id": 2}
    if bits is not None:
        settings["quantization"] = {"group_size": 32, "bits": bits}
    save_config(settings, folder / "config.json")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Gives the folder of a family, made once."""
    root = tmp_path_factory.mktemp("families")

    def give(name, bits=None, tied=None):
        folder = root / f"{name}-{bits}-{tied}"
        return folder if folder.exists() else write_family(folder, name, bits, tied)

    return give


def mlx_lm_logits(base, adapter=None):
    path = None if adapter is None else str(adapter)
    return mlx_lm.load(str(base), adapter_path=path)[0](TOKENS[None])[0].astype(mx.float32)


ATTENTION = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.qkv_proj"]
CASES = {
    "every layer": {"num_layers": -1},
    "some modules": {"keys": ATTENTION, "num_layers": 3},
    "embedding and head": {"keys": [*ATTENTION, "model.embed_tokens", "lm_head"]},
    "dora": {"keys": [*ATTENTION, "mlp.down_proj", "mlp.up_proj"], "dora": True},
}


@pytest.mark.parametrize("name, case, bits", all_pairs(FAMILIES, CASES, [None, 4]))
def test_logits_are_mlx_lms(family, tmp_path, name, case, bits):
    settings = CASES[case]
    if name == "qwen3_moe" and case == "dora":  # mlx-lm has none for experts
        settings = {"keys": ATTENTION, "dora": True}
    base = family(name, bits)
    folder = write_lora(tmp_path / "lora", base, **settings)
    expected = mlx_lm_logits(base, folder)
    for merge in (True, False):
        model, _ = ssmlx.load(base, adapter=folder, dtype="stored", merge_lora=merge)
        assert_close(logits(model), expected, TOLERANCE)
        kinds = {type(m) for m in model.backbone.model.modules() if isinstance(m, LoraLayer)}
        assert model.is_fine_tuned and model.num_streams == 0
        assert (RowLora in kinds) == (not merge or bits is not None)
    assert (ExpertsLora in kinds) == (name == "qwen3_moe" and case == "every layer")
    assert (EmbeddingLora in kinds) == (case == "embedding and head")
    assert np.abs(np.array(expected - mlx_lm_logits(base))).max() > 0.1


def test_dora_of_an_embedding_is_mlx_lms(family, tmp_path):
    """Of one that is the head too; of packed ones mlx-lm has none."""
    base = family("gemma3_text")
    folder = write_lora(tmp_path / "lora", base, keys=["model.embed_tokens"], dora=True)
    for merge in (True, False):
        model, _ = ssmlx.load(base, adapter=folder, merge_lora=merge)
        assert_close(logits(model), mlx_lm_logits(base, folder), TOLERANCE)


def test_a_model_that_decodes_plainly_alone_takes_it_too(family, tmp_path):
    base = family("qwen3_next", tied=True)
    folder = write_lora(tmp_path / "lora", base, num_layers=-1)
    model, _ = ssmlx.load(base, adapter=folder)
    assert not model.backbone.capabilities.has("stages")
    assert_close(logits(model), mlx_lm_logits(base, folder), TOLERANCE)
    assert_close(logits(ssmlx.swap_adapter(model, None)), mlx_lm_logits(base), TOLERANCE)


def trained(base, root, kind):
    """The folder that ten steps of mlx-lm's own training write."""
    lines = [{"text": f"w{n} w{n + 1} w{n + 2} w{n + 3}"} for n in range(12)]
    given = {
        "model": str(base), "data": str(write_data(root / "data", lines)), "train": True,
        "adapter_path": str(root / "adapters"), "iters": 10, "learning_rate": 0.05,
        "fine_tune_type": kind, "num_layers": 3, "trust_remote_code": False, "val_batches": 1,
    }  # fmt: skip
    mlx_lora.run(SimpleNamespace(**{**mlx_lora.CONFIG_DEFAULTS, **given}))
    return root / "adapters"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "dora"])
def test_a_fused_folder_is_a_model_like_any_other(family, tmp_path, kind, monkeypatch):
    base = family("llama")
    folder = trained(base, tmp_path, kind)
    command = "python -m mlx_lm fuse --model MODEL --adapter-path FOLDER --save-path OUT"
    if kind == "full":
        said = refusal(ssmlx.load, base, adapter=folder)
        assert command.replace("FOLDER", str(folder)) in said
    asked = {"MODEL": str(base), "FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    argv = [asked.get(word, word) for word in command.split()[3:]]
    monkeypatch.setattr("sys.argv", argv)
    fuse.main()
    assert_close(logits(ssmlx.load(tmp_path / "out")[0]), mlx_lm_logits(base, folder), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_what_a_run_of_mlx_lm_writes_is_an_adapter(family, tmp_path, kind):
    base = family("llama")
    folder = trained(base, tmp_path, kind)
    expected = mlx_lm_logits(base, folder)
    model, tokenizer = ssmlx.load(base, adapter=folder)
    assert_close(logits(model), expected, TOLERANCE)
    assert np.abs(np.array(expected - mlx_lm_logits(base))).max() > 0.1
    prompt = TOKENS.tolist()
    wanted = mlx_lm_tokens(mlx_lm.load(str(base), adapter_path=str(folder))[0], prompt, LENGTH)
    for settings in ({}, {"decoding": "speculative", "drafter": "prompt-lookup"}, {"temp": 0.0}):
        found, last = answer(model, tokenizer, prompt, max_tokens=LENGTH, **settings)
        assert found == wanted[: len(found)] and last.finish_reason in ("length", "stop")
    assert load_adapter(folder).base_model == str(base)


def test_lora_of_single_experts_is_that_of_their_layer(family, tmp_path):
    """As PEFT has it of models whose experts are layers of their own."""
    base = family("qwen3_moe")
    folder = write_lora(tmp_path / "lora", base, num_layers=-1)
    tensors = dict(mx.load(str(folder / FILE)))
    single = {name: array for name, array in tensors.items() if array.ndim == 2}
    for name in tensors.keys() - single.keys():
        if "layers.1." in name:  # an expert without any does what it did
            tensors[name] *= (mx.arange(len(tensors[name])) != 2)[:, None, None]
        for number, one in enumerate(tensors[name]):
            if not ("layers.1." in name and number == 2):
                single[name.replace("switch_mlp", f"experts.{number}")] = one.T
    mx.save_safetensors(str(folder / FILE), tensors)
    expected = mlx_lm_logits(base, folder)
    alone = write_pefts(tmp_path / "alone", single)
    assert_close(logits(ssmlx.load(base, adapter=alone)[0]), expected, TOLERANCE)
    beyond = {name.replace("experts.3", "experts.4"): array for name, array in single.items()}
    said = refusal(ssmlx.load, base, adapter=write_pefts(tmp_path / "beyond", beyond))
    assert "model.layers.0.mlp.experts.4." in said


# --- swapping, and in an engine ---


@pytest.fixture(scope="module")
def shelf(family, tmp_path_factory):
    """Two LoRAs and streams for one base."""
    base = family("llama")
    root = tmp_path_factory.mktemp("shelf")
    write_lora(root / "one", base, keys=[*ATTENTION, "model.embed_tokens", "lm_head"], seed=1)
    write_lora(root / "two", base, dora=True, num_layers=-1, seed=2)
    (root / "streams").mkdir()
    write_adapter(root / "streams", make_adapter(base, scope="streams"))
    return base, root


def greedy(model, tokenizer):
    return answer(model, tokenizer, TOKENS.tolist(), max_tokens=LENGTH)[0]


@pytest.mark.parametrize("merge", [True, False])
def test_a_swap_gives_what_a_load_gives_and_the_base_stays(shelf, merge):
    base, root = shelf
    names = ("one", "two", "streams", "none")
    where = {name: "none" if name == "none" else root / name for name in names}
    loaded = {name: ssmlx.load(base, adapter=folder) for name, folder in where.items()}
    wanted = {name: (logits(one), greedy(one, words)) for name, (one, words) in loaded.items()}
    assert len({tuple(tokens) for _, tokens in wanted.values()}) == 3  # streams change no answer
    model, tokenizer = ssmlx.load(base)
    before = dict(tree_flatten(model.backbone.model.parameters()))
    for name in ("one", "two", "one", "streams", "two", "none", "two", "none"):
        model = ssmlx.swap_adapter(model, where[name], merge_lora=merge)
        expected, tokens = wanted[name]
        assert_close(logits(model), expected, TOLERANCE)
        assert greedy(model, tokenizer) == tokens
    after = dict(tree_flatten(model.backbone.model.parameters()))
    assert all(mx.array_equal(after[name], array) for name, array in before.items())
    assert after.keys() == before.keys()


def test_an_engine_swaps_them_while_others_answer(shelf):
    base, root = shelf
    with ssmlx.Engine(base, [root / "one", root / "two"], dtype="float32") as engine:
        prompt = TOKENS.tolist()

        def ask(adapter):
            return engine.stream(prompt, adapter=adapter, max_tokens=LENGTH)

        def tokens(opened):
            return [token for segment in opened for token in segment.tokens]

        wanted = {
            name: greedy(*ssmlx.load(base, adapter=name))
            for name in ("none", root / "one", root / "two")
        }
        opened = {name: ask(name) for name in wanted}
        firsts = {name: list(next(iter(one)).tokens) for name, one in opened.items()}
        # Another one, and one that is broken, in the middle of these.
        talk = engine.chat(adapter=root / "one", max_tokens=LENGTH)
        list(talk.reply("w1 w2"))
        talk.swap_adapter(root / "streams")
        broken = shutil.copytree(root / "two", root / "broken", dirs_exist_ok=True)
        (broken / FILE).write_bytes((broken / FILE).read_bytes()[:-9])
        assert str(broken / FILE) in refusal(talk.swap_adapter, broken)
        assert str(broken / FILE) in refusal(engine.stream, prompt, adapter=broken)
        assert talk.model is engine.model(root / "streams")
        found = {name: firsts[name] + tokens(one) for name, one in opened.items()}
        assert found == wanted
        assert {name: tokens(ask(name)) for name in wanted} == wanted
        assert engine.adapters == ["none", *(str(root / n) for n in ("one", "two", "streams"))]


def test_a_server_lists_and_answers_with_both(shelf):
    pytest.importorskip("starlette")
    from asking import chat as asking
    from asking import client_of, reply, said

    from ssmlx.prompt_cache import PromptCache
    from ssmlx.server.app import make_app
    from ssmlx.server.handler import RequestHandler

    base, root = shelf
    with ssmlx.Engine(base, dtype="float32") as engine:
        models = {"tiny": None, "tiny:one": str(root / "one"), "tiny:two": str(root / "two")}
        handler = RequestHandler(engine, models, prompt_caches=[PromptCache()])
        client = client_of(make_app(handler, ssmlx.GenerateConfig(max_tokens=LENGTH)))
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == list(models)
        texts = [said(reply(client, asking("w1 w2 w3", model=name))) for name in models]
        for text, adapter in zip(texts, ("none", root / "one", root / "two"), strict=True):
            model, tokenizer = ssmlx.load(base, adapter=adapter, dtype="float32")
            prompt = ssmlx.prompt_tokens("w1 w2 w3", model, tokenizer)
            assert text == ssmlx.generate(model, tokenizer, prompt, max_tokens=LENGTH)
        assert len(set(texts)) == 3


# --- what is said, and refused ---


def test_nothing_asks_it_for_streams(shelf, capsys):
    base, root = shelf
    given = ("--model", base, "--adapter", root / "one", "--dtype", "float32")
    assert exit_code(check.main, *given, "--seconds", "0.1") == 0
    out = capsys.readouterr().out
    assert any(mentions(line, "LoRA", "4", "6") for line in out.splitlines())
    assert "ssmlx.adapt --adapter LORA" in out
    assert exit_code(generate.main, *given, "--prompt", "w1 w2", "--max-tokens", "4") == 0
    capsys.readouterr()
    more = ("--decoding", "speculative", "--prompt", "w1")
    assert mentions(exits(capsys, generate.main, *given, *more), "streams", "--adapter")
    talk = Chat(ssmlx.ChatSession(*ssmlx.load(base)), Screen(), None)
    own = change_adapter(str(root / "two"), talk)
    assert mentions(own, str(root / "two"), "LoRA")
    none = change_adapter("none", talk)
    assert none and not mentions(none, "LoRA")


def settings_of(**changes):
    def change(folder):
        path = folder / SETTINGS
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors_of(change):
    def changed(folder):
        tensors = dict(mx.load(str(folder / FILE)))
        change(tensors)
        mx.save_safetensors(str(folder / FILE), tensors)

    return changed


FIRST = "model.layers.2.self_attn.q_proj"
PLAIN = {"rank": 4, "scale": 3.0}
BAD = {
    "full": (settings_of(fine_tune_type="full"), "python -m mlx_lm fuse --model"),
    "another kind": (settings_of(fine_tune_type="ia3"), "fine_tune_type"),
    "no scale": (settings_of(lora_parameters={"alpha": 8}), "scale"),
    "a text": (settings_of(lora_parameters="8"), "lora_parameters"),
    "another rank": (settings_of(lora_parameters={**PLAIN, "rank": 5}), "rank 5"),
    "other keys": (settings_of(lora_parameters={**PLAIN, "keys": ["x"]}), "self_attn.q_proj"),
    "dora without norms": (settings_of(fine_tune_type="dora"), FILE),
    "half a pair": (tensors_of(lambda t: t.pop(f"{FIRST}.lora_b")), f"{FIRST}.lora_b"),
    "spare": (tensors_of(lambda t: t.update({"x.weight": mx.ones(2)})), "x.weight"),
    "no numbers": (
        tensors_of(lambda t: t.update({f"{FIRST}.lora_b": t[f"{FIRST}.lora_b"] / 0})),
        f"{FIRST}.lora_b",
    ),
    "another place": (
        tensors_of(
            lambda t: t.update(
                {n.replace(".2.", ".9."): t.pop(n) for n in [f"{FIRST}.lora_a", f"{FIRST}.lora_b"]}
            )
        ),
        "model.layers.9.self_attn.q_proj.lora_a",
    ),
    "another size": (
        tensors_of(lambda t: t.update({f"{FIRST}.lora_a": mx.ones((33, 4))})),
        f"{FIRST}.lora_a (33, 4)",
    ),
    "no settings": (lambda folder: (folder / SETTINGS).unlink(), "streams_config.json"),
    "no weights": (lambda folder: (folder / FILE).unlink(), FILE),
    "no json": (lambda folder: (folder / SETTINGS).write_text("{"), SETTINGS),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(family, tmp_path, case, capsys):
    base = family("llama")
    folder = write_lora(tmp_path / "lora", base, keys=ATTENTION)
    spoil, named = BAD[case]
    spoil(folder)
    model, _ = ssmlx.load(base)
    before = logits(model)
    assert named in refusal(ssmlx.swap_adapter, model, folder)
    assert mx.array_equal(logits(model), before)
    given = ("--model", base, "--adapter", folder, "--prompt", "w1")
    assert named in exits(capsys, generate.main, *given)


def test_a_lora_of_another_model_names_both(family, tmp_path):
    folder = write_lora(tmp_path / "lora", family("llama"), keys=ATTENTION)
    settings_of(model="org/that")(folder)
    said = refusal(ssmlx.load, family("phi3"), adapter=folder)
    assert mentions(said, "org/that", str(family("phi3")))


# --- beside streams ---


def test_streams_draft_for_a_model_with_any_of_it(shelf, tmp_path):
    """Whatever LoRA the model has, also on its embedding and its head, packed and whole."""
    base, root = shelf
    packed = write_packed(tmp_path / "packed", base)
    for folder, dtype in ((base, "float32"), (packed, "stored")):
        for name in ("one", "two"):
            plain, tokenizer = ssmlx.load(folder, adapter=root / name, dtype=dtype)
            lora = load_adapter(root / name).lora
            more = {"draft_vocab": [1, 4, 9, 30], "condition_rank": 3} if name == "one" else {}
            streams = make_adapter(base, scope="streams", **more)
            out = tmp_path / f"{dtype} {name}"
            out.mkdir()
            write_adapter(out, replace(streams, lora=lora))
            model, _ = ssmlx.load(folder, adapter=out, dtype=dtype)
            assert_close(logits(model), logits(plain), TOLERANCE)
            expected = greedy(plain, tokenizer)
            found, last = answer(
                model, tokenizer, TOKENS.tolist(), max_tokens=LENGTH, decoding="speculative"
            )
            assert found == expected and last.drafted_tokens > 0


def test_ranks_and_scales_that_differ_become_one(family, tmp_path):
    base = family("qwen3_moe")
    first = load_adapter(write_lora(tmp_path / "one", base, num_layers=4, scale=2.0)).lora
    second = load_adapter(write_lora(tmp_path / "two", base, num_layers=4, rank=2, seed=3)).lora
    mixed = {path: (first if n % 2 else second)[path] for n, path in enumerate(sorted(first))}
    same = unify_rank_and_scale(mixed)
    assert {(one.rank, one.scale) for one in same.values()} == {(4, 1.0)}
    backbone, _ = load_base(base, "float32")
    found = [
        logits(attach_adapter(backbone, Adapter(lora=lora), merge_lora=False))
        for lora in (mixed, same)
    ]
    assert_close(*found, TOLERANCE)


def test_ssmlx_and_mlx_lm_read_what_is_written_beside_streams(family, tmp_path):
    base = family("qwen3_moe")
    lora = load_adapter(write_lora(tmp_path / "one", base, num_layers=3)).lora
    (tmp_path / "both").mkdir()
    write_adapter(tmp_path / "both", replace(make_adapter(base, scope="streams"), lora=lora))
    again = load_stream_adapter(tmp_path / "both")
    assert again.lora.keys() == lora.keys() and again.task_lora is again.lora
    model, _ = ssmlx.load(base, adapter=tmp_path / "both")
    assert_close(logits(model), mlx_lm_logits(base, tmp_path / "both"), TOLERANCE)
