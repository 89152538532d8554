"""Gemma 4's assistants: their drafts are transformers', and the answers plain decoding's."""

import json
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from loops import plain_tokens, speculative_steps
from mlx.utils import tree_flatten
from real import write_tokenizer
from refusals import exits, found_in, mentions, refusal
from tiny import assert_close, first_tokens, slow
from tiny_classes import chain_of
from tiny_gemma import TARGETS, VOCAB, WINDOW, changed, make_target, write_assistant

import ssmlx
from ssmlx.commands import generate
from ssmlx.decoding.loop import prefill
from ssmlx.decoding.sampling import GREEDY, Sampling
from ssmlx.decoding.step import DraftTotals
from ssmlx.drafters.gemma_assistant import AssistantDrafter, load_assistant
from ssmlx.drafters.gemma_assistant_model import AssistantModel
from ssmlx.settings import GenerateConfig

DRAFTED = 4
PROMPT = [3, 17, 40, 5, 22, 9, 61, 2, 33, 17, 40, 8, 12]
SAMPLED = {"temp": 1.0, "top_p": 0.9, "seed": 3}
KINDS = {"whole": {}, "clusters": {"use_ordered_embeddings": True}}
BOTH = pytest.mark.parametrize(
    ("target", "kind"), [("large", "whole"), ("small", "clusters")], ids=["31B", "E2B"]
)


def load(folder, model, dtype="auto"):
    """The assistant of a folder."""
    values = json.loads((folder / "config.json").read_text())
    return load_assistant(folder, values, model.backbone, dtype)


def make_drafter(assistant, model, tokens=DRAFTED, sampling=GREEDY):
    return AssistantDrafter(assistant, model.backbone, tokens, sampling)


def plain(model, count, sampling=GREEDY, prompt=PROMPT):
    return plain_tokens(model, prompt, count, sampling)


class Checked(AssistantDrafter):
    """Drafts, but hands over chains of which some tokens are right, as a script says."""

    def __init__(self, assistant, model, answer, script):
        super().__init__(assistant, model.backbone, DRAFTED, GREEDY)
        self._answer = answer
        self._script = iter(script)
        self.chains = []

    def propose(self, verified, shape):
        self.chains.append(super().propose(verified, shape).tokens.tolist())
        root = len(self._text) - 1 - len(PROMPT)
        return chain_of(self._answer, root, next(self._script))


def run_rounds(monkeypatch, model, assistant, script, answer):
    """Decode with a scripted draft a round; returns the steps of each, and the chains drafted."""
    steps = []
    real = AssistantModel.__call__

    def noted(self, *given):
        found = real(self, *given)
        mx.eval(given, found)
        steps.append((given, found))
        return found

    monkeypatch.setattr(AssistantModel, "__call__", noted)
    drafter = Checked(assistant, model, answer, script)
    decoding = speculative_steps(model, PROMPT, [drafter], prefill_step_size=5)
    # The last chain is drafted before the tokens of the call before are given out.
    count = sum(script[:-1]) + len(script)
    tokens, lengths = first_tokens(decoding, count)
    assert tokens == answer[:count]
    assert lengths == [1, *(right + 1 for right in script[:-1])]
    assert len(steps) == DRAFTED * len(script) == drafter.draft_model_calls
    return [steps[n : n + DRAFTED] for n in range(0, len(steps), DRAFTED)], drafter.chains


def to_torch(array):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(array))


def assert_logits(found, expected):
    """Logits [1, V] are transformers', which gives tokens outside of clusters its floor."""
    known = np.isfinite(np.array(found))
    expected = expected.numpy()
    assert_close(np.array(found)[known], expected[known], 1e-4)
    if not known.all():
        assert known.sum() == VOCAB // 16 * 5
        assert (expected[~known] < expected[known].min()).all()


@BOTH
def test_each_step_is_transformers(target, kind, tmp_path, monkeypatch):
    """Over rounds with rejections: hidden states and logits, of the arrays that the target gave."""
    torch = pytest.importorskip("torch")
    from transformers import Gemma4AssistantForCausalLM

    model = make_target(target)
    folder = write_assistant(tmp_path / "assistant", **KINDS[kind])
    script = [0, 2, 4, 4, 0, 1, 3, 0, 4]
    rounds, _ = run_rounds(monkeypatch, model, load(folder, model), script, plain(model, 60))
    theirs = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    place = len(PROMPT)
    for steps, right in zip(rounds, script, strict=True):
        hidden = to_torch(steps[0][0][1])
        for (embedded, _, position, read), (logits, following) in steps:
            assert position.item() == place
            assert read["full_attention"][0].shape[2] == place
            assert read["sliding_attention"][0].shape[2] == min(place, WINDOW)
            with torch.no_grad():
                out = theirs(
                    inputs_embeds=torch.cat([to_torch(embedded), hidden], dim=-1),
                    position_ids=torch.tensor([[place]]),
                    shared_kv_states={
                        name: tuple(to_torch(one) for one in pair) for name, pair in read.items()
                    },
                )
            hidden = out.last_hidden_state
            assert_close(following, hidden, 1e-4)
            assert_logits(logits, out.logits[0])
        place += right + 1


def by_row(rows):
    """Keys or values [1, H, R, Dh] as R rows, in the order of their first numbers."""
    rows = np.moveaxis(np.array(rows)[0], 1, 0).reshape(rows.shape[2], -1)
    return rows[np.argsort(rows[:, 0])]


@BOTH
def test_what_is_read_of_the_target_is_what_transformers_reads(target, kind, tmp_path, monkeypatch):
    """Its hidden state, embedding, keys and values, against transformers' own whole text."""
    torch = pytest.importorskip("torch")
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = make_target(target)
    values = {**TARGETS[target].get("text_config", TARGETS[target])}
    values.pop("model_type")
    theirs = Gemma4ForCausalLM(Gemma4TextConfig(**values)).eval()
    weights = {
        name.removeprefix("language_model."): to_torch(one)
        for name, one in tree_flatten(model.backbone.model.parameters())
    }
    missing = theirs.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    folder = write_assistant(tmp_path / "assistant", **KINDS[kind])
    script = [0, 2, 4, 0, 1, 4]
    answer = plain(model, 60)
    text = [*PROMPT, *answer]
    rounds, chains = run_rounds(monkeypatch, model, load(folder, model), script, answer)
    place = len(PROMPT)
    for steps, chain, right in zip(rounds, chains, script, strict=True):
        assert chain[0] == text[place]
        with torch.no_grad():
            out = theirs(
                torch.tensor([text[:place]]),
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
            rows = theirs.get_input_embeddings()(torch.tensor([chain]))
        (_, hidden, _, read), _ = steps[0]
        assert_close(hidden, out.hidden_states[-1][:, -1:], 1e-4)
        for level, ((embedded, _, _, again), _) in enumerate(steps):
            assert_close(embedded, rows[:, level : level + 1], 1e-5)
            assert again is read
        for name, own in read.items():
            for found, expected in zip(own, out.shared_kv_states[name], strict=True):
                found = np.array(found)
                expected = expected[:, :, -found.shape[2] :].numpy()
                assert_close(by_row(found), by_row(expected), 1e-4)
        place += right + 1


@pytest.mark.parametrize(("target", "kind", "settings", "count"), [
    ("large", "whole", {}, 30), ("small", "clusters", SAMPLED, 30),
    *slow(("large", "whole", SAMPLED, 300), ("small", "clusters", {}, 300)),
], ids=str)  # fmt: skip
def test_tokens_are_plain_decodings(target, kind, settings, count, tmp_path):
    model = make_target(target)
    sampling = Sampling(GenerateConfig(**settings), VOCAB)
    assistant = load(write_assistant(tmp_path / "assistant", **KINDS[kind]), model)
    totals = DraftTotals()
    drafter = make_drafter(assistant, model, sampling=sampling)
    steps = speculative_steps(model, PROMPT, [drafter], sampler=sampling)
    tokens, lengths = first_tokens(steps, count, totals)
    assert tokens == plain(model, count, sampling)
    assert totals.drafts["mtp"].drafted == DRAFTED * (len(lengths) - 1)
    assert drafter.draft_model_calls == DRAFTED * len(lengths)


def test_an_assistant_that_is_always_wrong_is_told(tmp_path, caplog):
    model = make_target("small")
    assistant = load(write_assistant(tmp_path / "assistant"), model)
    drafter = make_drafter(assistant, model)
    answer = plain(model, 20)
    real = AssistantDrafter.propose

    def wrong(verified, shape):
        tree = real(drafter, verified, shape)
        return replace(tree, tokens=mx.concatenate([tree.tokens[:1], 0 * tree.tokens[1:]]))

    assert 0 not in answer
    drafter.propose = wrong
    steps = speculative_steps(model, PROMPT, [drafter])
    assert first_tokens(steps, 20)[0] == answer[:20]
    (line,) = caplog.messages
    assert mentions(line, "64")
    assert drafter.offer() is None and make_drafter(assistant, model).offer() is not None


@pytest.mark.parametrize("dtype", ["auto", "stored"])
def test_packed_targets_and_assistants(dtype, tmp_path):
    """An assistant is packed as its target is; one that is stored packed stays so."""
    model = make_target("large", bits=4)
    folder = write_assistant(
        tmp_path / "plain", hidden_size=32, intermediate_size=32, **KINDS["clusters"]
    )
    assistant = load(folder, model, dtype)
    kinds = {type(one) for one in assistant.model.modules()}
    assert nn.QuantizedEmbedding in kinds and nn.QuantizedLinear in kinds
    assert assistant.model.pre_projection.bits == 4

    packed = tmp_path / "packed"
    packed.mkdir()
    values = json.loads((folder / "config.json").read_text())
    how = {"group_size": 32, "bits": 8}
    (packed / "config.json").write_text(json.dumps({**values, "quantization": how}))
    loaded = AssistantModel(assistant.config)
    loaded.load_weights(list(mx.load(str(folder / "model.safetensors")).items()))
    nn.quantize(loaded, **how)
    mx.save_safetensors(str(packed / "model.safetensors"), dict(tree_flatten(loaded.parameters())))
    again = load(packed, model, dtype)
    # On the CPU "auto" unpacks, and packs as the target is.
    assert again.model.pre_projection.bits == (8 if dtype == "stored" else 4)
    expected = plain(model, 20)
    for one in (assistant, again):
        drafter = make_drafter(one, model)
        assert first_tokens(speculative_steps(model, PROMPT, [drafter]), 20)[0] == expected

    for bits in (77, 4, "8"):
        (packed / "config.json").write_text(
            json.dumps({**values, "quantization": {"group_size": 32, "bits": bits}})
        )
        line = refusal(load, packed, model, dtype)
        assert mentions(line, "quantization") or "layers.0" in line or "proj" in line


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with a target, `target`, and an assistant, `assistant`, as users have them."""
    folder = tmp_path_factory.mktemp("shelf")
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGETS["small"]))
    weights = dict(tree_flatten(make_target("small").backbone.model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(target)
    write_assistant(folder / "assistant", **KINDS["clusters"])
    return folder


@pytest.fixture(scope="module")
def loaded(shelf):
    """The target, its tokenizer and the assistant, as `ssmlx` loads them."""
    model, tokenizer = ssmlx.load(str(shelf / "target"), dtype="float32")
    return model, tokenizer, ssmlx.load_mtp(model, shelf / "assistant")


def answer(model, tokenizer, prompt=PROMPT, **more):
    """Tokens of an answer, and how many of them were drafted."""
    config = {"max_tokens": 30, **more}
    responses = list(ssmlx.stream_generate(model, tokenizer, prompt, **config))
    return [token for one in responses for token in one.tokens], responses[-1]


def test_answers_are_plain_decodings(loaded):
    model, tokenizer, assistant = loaded
    settings = {**SAMPLED, "repetition_penalty": 1.3}
    expected, _ = answer(model, tokenizer, decoding="plain", **settings)
    for decoding in ("speculative", None):
        found, last = answer(model, tokenizer, drafter=assistant, decoding=decoding, **settings)
        assert found == expected and last.target_calls > 0


def test_a_warm_prompt_cache_gives_what_a_cold_one_does(loaded, monkeypatch):
    """The second turn of a chat begins behind keys and values that are there: drafts are equal."""
    model, _, assistant = loaded
    text = [*PROMPT, *plain(model, 40)]
    drafted = []
    for known in (0, 5, 30):
        drafter = make_drafter(assistant, model)
        cache = model.make_cache()
        prefill(model, text[:known], cache)
        steps = speculative_steps(model, text[known:33], [drafter], cache, context=text[:known])
        chains = []
        real = drafter.propose
        monkeypatch.setattr(
            drafter,
            "propose",
            lambda *given, real=real, chains=chains: chains.append(real(*given)) or chains[-1],
        )
        assert first_tokens(steps, 10)[0] == text[33:43]
        drafted.append([tree.tokens.tolist() for tree in chains])
    assert all(one == drafted[0] for one in drafted)


def test_two_answers_at_once(loaded):
    """Call by call in turns, of different texts, on one assistant."""
    model, _, assistant = loaded
    prompts = [PROMPT, PROMPT[::-1]]
    running = [
        speculative_steps(model, prompt, [make_drafter(assistant, model)]) for prompt in prompts
    ]
    found = [[], []]
    for _ in range(16):
        for tokens, steps in zip(found, running, strict=True):
            step = next(steps)
            tokens += step.tokens if step else ()
    for tokens, prompt in zip(found, prompts, strict=True):
        assert len(tokens) > 10 and tokens == plain(model, len(tokens), prompt=prompt)


def test_an_engine_and_a_stop_in_the_middle(loaded, shelf):
    model, tokenizer, assistant = loaded
    expected, _ = answer(model, tokenizer)
    more = {"max_tokens": 30, "decoding": "speculative", "drafter": assistant}
    with ssmlx.Engine(str(shelf / "target"), dtype="float32") as engine:
        with engine.stream(PROMPT, **more) as stopped:
            next(iter(stopped))
            stopped.cancel()
        answers = [engine.stream(PROMPT, **more) for _ in range(2)]
        for one in answers:
            assert [token for segment in one for token in segment.tokens] == expected


def test_the_option_takes_an_assistant(shelf, capsys):
    expected = None
    for drafter in (None, f"mtp model={shelf / 'assistant'} tokens=2"):
        options = ["--drafter", drafter] if drafter else ["--decoding", "plain"]
        words = ["--model", str(shelf / "target"), "--max-tokens", "12", "--temp", "0", *options]
        assert generate.main([*words, "--prompt", "w1 w2 w3", "--verbose"]) in (0, None)
        out, err = capsys.readouterr()
        expected = expected or out
        assert out == expected
    assert "mtp" in err
    for drafter in ("mtp", f"mtp model={shelf / 'target'}"):
        line = exits(capsys, generate.main, *words[:-1], drafter, "--prompt", "w1")
        assert "gemma4" in line and "mtp model=" in line


WRONG = {
    "width": ({"backbone_hidden_size": 48}, "48"),
    "vocabulary": ({"vocab_size": 80}, "80 64"),
    "head_dim": ({"head_dim": 16}, "sliding_attention 16 8"),
    "global_head_dim": ({"global_head_dim": 8}, "full_attention 8 16"),
    "heads": ({"num_attention_heads": 3}, "3"),
    "experts": ({"enable_moe_block": True}, "enable_moe_block True False"),
    "activation": ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
    "own_keys": ({"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 3"),
    "types": ({"layer_types": ["full_attention"]}, "layer_types 1 3"),
    "type": ({"layer_types": ["linear"] * 3}, "layer_types 'linear'"),
    "size": ({"hidden_size": "big"}, "hidden_size 'big'"),
    "huge": ({"intermediate_size": 2**40}, f"intermediate_size {2**40}"),
    "no_size": ({"hidden_size": None}, "hidden_size"),
    "text": ({"text_config": 3}, "text_config 3"),
    "rope": ({"rope_parameters": {"full_attention": 1}}, "sliding_attention"),
    "clusters": ({"num_centroids": 7}, "7 64"),
    "shape": ({"intermediate_size": 40}, "model.layers.0.mlp.gate_proj.weight"),
}
"""Settings of an assistant, and what the line that refuses them names."""


@pytest.mark.parametrize("case", WRONG)
def test_bad_settings_get_one_line(case, shelf, loaded, tmp_path):
    changes, named = WRONG[case]
    values = changed(json.loads((shelf / "assistant/config.json").read_text()), **changes)
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").symlink_to(shelf / "assistant/model.safetensors")
    assert mentions(refusal(ssmlx.load_mtp, loaded[0], folder), *named.split())


NAN = mx.full((16, 64), float("nan"))
ORDER = "masked_embedding.token_ordering"
BROKEN = {
    "nan": ({"pre_projection.weight": NAN}, "pre_projection.weight"),
    "unknown": ({"model.layers.0.self_attn.k_proj.weight": NAN}, "self_attn.k_proj.weight"),
    "missing": ({"post_projection.weight": None}, "post_projection.weight"),
    "shape": ({"model.norm.weight": mx.zeros(9)}, "model.norm.weight (9,)"),
    "whole": ({"model.norm.weight": mx.zeros(16, mx.int32)}, "model.norm.weight"),
    "twice": ({ORDER: mx.zeros(VOCAB, mx.int64)}, ORDER),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_weights_get_one_line(case, loaded, tmp_path):
    tensors, name = BROKEN[case]
    folder = write_assistant(tmp_path / "broken", tensors, **KINDS["clusters"])
    assert mentions(refusal(ssmlx.load_mtp, loaded[0], folder), name)


def test_half_a_download_gets_one_line(loaded, shelf, tmp_path):
    whole = (shelf / "assistant/model.safetensors").read_bytes()
    folder = write_assistant(tmp_path / "half", **KINDS["clusters"])
    for size in (0, 5, 200, len(whole) // 2, len(whole) - 1):  # bytes
        (folder / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors" in refusal(ssmlx.load_mtp, loaded[0], folder)
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002.safetensors" in refusal(ssmlx.load_mtp, loaded[0], folder)


def test_other_models_and_settings_are_refused(loaded, shelf, base):
    model, tokenizer, assistant = loaded
    llama, _ = ssmlx.load(str(base), dtype="float32")
    assert "llama" in found_in(refusal(ssmlx.load_mtp, llama, shelf / "assistant"))
    asked = (tokenizer, PROMPT)
    assert "llama" in found_in(refusal(ssmlx.generate, llama, *asked, drafter=assistant))
    assert mentions(refusal(make_drafter, assistant, make_target("large")), "layers")
    before = ssmlx.MtpConfig(hidden="before")
    said = refusal(ssmlx.generate, model, *asked, drafter=assistant, drafter_settings=before)
    assert mentions(found_in(said), "hidden=before")


@pytest.mark.parametrize("layer", [0, 2])
def test_keys_and_values_of_committed_tokens(base, layer):
    """Of a model with stages too: those that mlx-lm's own cache holds, without scratch rows."""
    model, _ = ssmlx.load(str(base), dtype="float32")
    expected = model.backbone.make_model_cache()
    model.backbone.model(mx.array([PROMPT]), cache=expected)
    cache = model.make_cache()
    cache.reserve(more_tokens=4, step_rows=9)
    prefill(model, PROMPT, cache)
    for found, own in zip(
        cache.keys_and_values(layer), expected[layer].keys_and_values(), strict=True
    ):
        assert_close(found, own, 1e-5)
