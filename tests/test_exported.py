"""The host loop of an exported model: slots, trees, manifest and segments, without any model."""

import json
import sys

import mlx.core as mx
import numpy as np
import pytest
from refusals import found_in, mentions, refusal
from tiny import make_tokenizer

from ssmlx import exported
from ssmlx.exported.api import ExportedModel, stream_generate
from ssmlx.exported.backends import CarriedCacheBackend, CoreMLStateBackend, coreml_backend
from ssmlx.exported.decode import MASKED, SlotCache, build_decode_inputs, speculative_decode
from ssmlx.exported.manifest import Manifest, TreeShape, package_digest
from ssmlx.model.tree import draft_topology, grow_tree, root_tree
from ssmlx.settings import TreeConfig

STREAMS = 3
NODES = 6
SLOTS = 40
CHUNK = 4
VOCAB = 50


def make_partial_manifest(**changes) -> Manifest:
    values = {
        "target": "coreml", "profile": "gpu", "dtype": "float32", "prompt_template": None,
        "cache": "arrays", "cache_names": ("keys_00", "values_00"),
        "cache_shape": (1, 1, SLOTS, 1), "num_slots": SLOTS, "chunk": CHUNK,
        "num_nodes": NODES, "num_kept": NODES, "num_streams": STREAMS,
        "tree": TreeShape(NODES - 1, NODES),
    }  # fmt: skip
    return Manifest(**{**values, **changes})


class Counting:
    """Counts upwards; its streams foresee `right` tokens and then err.

    It reads the text from the cache alone: each row looks for the slots that its mask shows.
    """

    def __init__(self, manifest: Manifest, right: int = STREAMS) -> None:
        self.manifest = manifest
        self.right = right
        self.calls = []

    def make_state(self):
        return {"tokens": np.full(SLOTS, -1), "positions": np.full(SLOTS, -1)}

    def predict(self, function, inputs, state):
        self.calls.append(function)
        state["tokens"][inputs["slots"]] = inputs["tokens"]
        state["positions"][inputs["slots"]] = inputs["positions"]
        if function == "prefill":
            return {"last_slot": inputs["slots"][-1:]}
        targets = np.array([self._next(row, state) for row in inputs["mask"][0, 0]], np.int32)
        last = self._last(inputs, targets)
        return {"target_tokens": targets, "last": np.array([last]), **self._draft(targets[last])}

    def _next(self, mask, state):
        """What follows the text that a row sees: nothing that counts, where the text does not."""
        seen = np.flatnonzero(mask == 0)
        order = seen[np.argsort(state["positions"][seen])]
        assert state["positions"][order].tolist() == list(range(len(order)))
        text = state["tokens"][order]
        counts = (np.diff(text) % VOCAB == 1).all()
        return (text[-1] + 1) % VOCAB if counts else 0

    def _last(self, inputs, targets):
        agrees = inputs["tokens"] == targets[inputs["parents"]]
        agrees |= inputs["depths"] == 0
        whole = [agrees[row > 0].all() for row in inputs["ancestors"]]
        return int(np.where(whole, inputs["depths"], -1).argmax())

    def _draft(self, root):
        ranks = np.arange(self.manifest.tree.num_candidates)
        ahead = np.arange(1, STREAMS + 1)[:, None]
        tokens = (root + ahead + ranks + (ahead > self.right)) % VOCAB
        logprobs = np.broadcast_to(-0.1 - ranks * 3.0, tokens.shape)
        if self.manifest.tree.is_conditional:  # The likeliest alone: the one that counts is last.
            tokens = tokens[:, ::-1]
            given = np.concatenate([np.full_like(tokens[:1], root), tokens[:-1]])
            counts = (tokens[:, None] - given[:, :, None]) % VOCAB == 1
            logprobs = np.where(counts, -0.1, logprobs[:, None] - 6)
        return {
            "candidate_tokens": tokens.astype(np.int32),
            "candidate_logprobs": logprobs.astype(np.float32),
        }


def make_model(right: int = STREAMS, **changes) -> ExportedModel:
    manifest = make_partial_manifest(**changes)
    return ExportedModel(Counting(manifest, right), manifest, make_tokenizer(VOCAB))


def test_rejected_slots_are_free_again_and_committed_ones_are_not():
    cache = SlotCache(None, 6)
    assert cache.find_free_slots(4).tolist() == [0, 1, 2, 3]
    cache.commit(np.array([2, 0]), [7, 8])
    assert cache.offset == 2 and cache.find_free_slots(4).tolist() == [1, 3, 4, 5]
    assert mentions(refusal(cache.find_free_slots, 5), "2", "6", "5")


def test_a_row_sees_what_is_committed_and_its_ancestors():
    """Slots 1 and 4 are committed; a root, its child and a row that fills up go to 0, 2 and 5.

        0  1  2  3  4  5
    n0  x  x        x
    n1  x  x  x     x
    --     x        x  x
    """
    cache = SlotCache(None, 6)
    cache.commit(np.array([4, 1]), [7, 8])
    visible = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], bool)
    mask = cache.build_mask(np.array([0, 2, 5]), visible)
    seen = [[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 1, 0], [0, 1, 0, 0, 1, 1]]
    assert mask.shape == (1, 1, 3, 6)
    assert np.array_equal(mask[0, 0], np.where(np.array(seen, bool), 0, MASKED))


def test_nodes_that_fill_up_see_themselves_alone_and_have_no_depth():
    cache = SlotCache(None, SLOTS)
    inputs = build_decode_inputs(
        root_tree(mx.array([9])), cache.find_free_slots(NODES), cache, make_partial_manifest()
    )
    assert inputs["tokens"].tolist() == [9, 0, 0, 0, 0, 0]
    assert inputs["depths"].tolist() == [0, -1, -1, -1, -1, -1]
    assert np.array_equal(inputs["ancestors"], np.eye(NODES))


@pytest.mark.parametrize(("right", "advance"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_each_call_advances_by_what_the_streams_foresaw(right, advance):
    model = make_model(right)
    steps = speculative_decode(
        model.backend, model.manifest, [5, 6, 7, 8, 9, 10], model.make_cache()
    )
    taken = [next(steps) for _ in range(5)]
    assert [len(step.tokens) for step in taken] == [1, *[advance] * 4]
    tokens = [token for step in taken for token in step.tokens]
    assert tokens == list(range(11, 11 + len(tokens)))
    assert taken[0].draft is None
    assert all(step.draft.accepted == right <= step.draft.drafted for step in taken[1:])
    assert model.backend.calls == ["prefill", "prefill", *["decode"] * 5]


def test_candidates_may_be_scored_given_the_token_before():
    model = make_model(tree=TreeShape(NODES - 1, NODES, is_conditional=True))
    steps = speculative_decode(model.backend, model.manifest, [5, 6, 7], model.make_cache())
    assert [len(next(steps).tokens) for _ in range(4)] == [1, *[1 + STREAMS] * 3]


def test_a_cache_goes_on_where_the_last_answer_ended():
    model = make_model()
    cache = model.make_cache()
    first = list(stream_generate(model, [1, 2, 3], max_tokens=4, cache=cache))
    said = [token for response in first for token in response.tokens]
    assert said == [4, 5, 6, 7]
    assert first[-1].drafted_tokens == first[-1].drafts["streams"].drafted > 0
    held = cache.offset
    more = list(range(held + 1, held + 4))
    second = next(stream_generate(model, more, cache=cache))
    assert second.cached_tokens == held and second.prompt_tokens == held + 3
    assert second.prompt_tps == pytest.approx(3 / second.prefill_seconds)
    assert second.prompt_tokens == more[-1] == second.tokens[0] - 1


def test_an_answer_ends_at_its_end_token_its_length_or_the_context():
    def last(**settings):
        changes = {name: settings.pop(name) for name in ("end_token_ids",) if name in settings}
        responses = list(stream_generate(make_model(**changes), [1, 2, 3], **settings))
        tokens = [token for response in responses for token in response.tokens]
        assert responses[-1].generation_tokens == len(tokens)
        assert responses[-1].target_calls == len(responses)
        assert all(response.finish_reason is None for response in responses[:-1])
        return tokens, responses[-1].finish_reason

    assert last(end_token_ids=(9,)) == ([4, 5, 6, 7, 8, 9], "stop")
    assert last(max_tokens=3) == ([4, 5, 6], "length")
    tokens, reason = last(max_tokens=1000)
    assert reason == "context" and SLOTS - NODES < 2 + len(tokens) <= SLOTS


def test_the_text_is_the_tokenizers():
    model = make_model()
    text = "".join(one.text for one in stream_generate(model, "w1 w2 w3", max_tokens=5))
    assert text.split() == [f"w{i}" for i in range(4, 9)]
    assert exported.generate(model, "w1 w2 w3", max_tokens=2).split() == ["w4", "w5"]


def test_bad_prompts_are_refused():
    model = make_model()
    assert mentions(refusal(stream_generate, model, []), "prompt")
    assert mentions(refusal(stream_generate, model, list(range(37))), "prompt", "37")
    assert mentions(refusal(stream_generate, model, [1], max_tokens=0), "--max-tokens", "0")
    assert mentions(refusal(exported.prompt_tokens, model, " "), "prompt")


def test_a_package_that_accepts_otherwise_than_the_host_is_found_out():
    model = make_model()
    model.backend._last = lambda inputs, targets: 0
    with pytest.raises(RuntimeError):
        list(stream_generate(model, [1, 2, 3], max_tokens=20))


def test_the_adapters_template_comes_before_the_chat_template():
    model = make_model(prompt_template="w1 {prompt} w2")
    assert exported.prompt_tokens(model, "w7") == [1, 7, 2]
    assert exported.prompt_tokens(make_model(), "w7") == [7]


def test_several_turns_need_a_chat_template():
    turns = [{"role": role, "content": "w1"} for role in ("user", "assistant", "user")]
    line = refusal(exported.prompt_tokens, make_model(), {"messages": turns})
    assert mentions(line, "chat template")
    model = make_model(prompt_template="w1 {prompt} w2")
    assert exported.prompt_tokens(model, {"messages": turns[:1]}) == [1, 1, 2]


def test_carried_caches_are_inputs_and_outputs():
    def call(function, inputs):
        written = inputs["keys_00"] + 1
        outputs = {"last": np.zeros(1), "keys_00_new": written, "values_00_new": -written}
        return outputs if function == "decode" else {}

    backend = CarriedCacheBackend(call, make_partial_manifest())
    state = backend.make_state()
    for count in (1, 2):
        assert set(backend.predict("decode", {"tokens": np.zeros(1)}, state)) == {"last"}
        assert (state["keys_00"] == count).all() and (state["values_00"] == -count).all()


def test_core_ml_keeps_one_state_for_both_functions():
    class Model:
        def make_state(self):
            return {"writes": 0}

        def predict(self, inputs, state):
            state["writes"] += 1
            return {"writes": np.array([state["writes"]])}

    backend = CoreMLStateBackend({"prefill": Model(), "decode": Model()})
    state = backend.make_state()
    found = [backend.predict(name, {}, state)["writes"][0] for name in ("prefill", "decode")]
    assert found == [1, 2]


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there")
def test_core_ml_is_asked_for_on_a_mac_only(tmp_path):
    assert mentions(refusal(coreml_backend, tmp_path, make_partial_manifest()), "macOS")


def write_export(folder, **changes):
    package = folder / "model.mlpackage"
    package.mkdir(parents=True)
    (package / "weights").write_bytes(b"abc")
    make_partial_manifest(digest=package_digest(package), **changes).write(folder)
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    folder = write_export(tmp_path / "out", end_token_ids=(2, 5), prompt_template="a {prompt}")
    read = Manifest.read(folder)
    changes = {"end_token_ids": (2, 5), "prompt_template": "a {prompt}"}
    assert read == make_partial_manifest(digest=read.digest, **changes)
    written = json.loads((folder / "manifest.json").read_text())
    assert written["format"] == "ssmlx-export/2" and written["cache_names"][0] == "keys_00"
    assert set(written["tree"]) == {"num_candidates", "size", "width", "is_conditional"}
    assert read.unchanged_package(folder) == folder / "model.mlpackage"


@pytest.mark.parametrize("tree", [
    TreeConfig(size=NODES), TreeConfig(size=NODES, width=2), TreeConfig(kind="full", width=2),
    TreeConfig(kind="full", width=1), TreeConfig(size=1),
], ids=str)  # fmt: skip
def test_a_manifest_of_the_first_format_grows_the_trees_that_it_lists(tree, tmp_path):
    topology = draft_topology(tree, STREAMS)
    listed = {name: getattr(topology, name).tolist() for name in ("slots", "depths", "paths")}
    size = min(tree.num_nodes(STREAMS), topology.num_nodes)
    count = topology.num_candidates
    folder = write_export(tmp_path / "out", num_nodes=size, num_kept=size)
    path = folder / "manifest.json"
    values = {**json.loads(path.read_text()), "format": "ssmlx-export/1"}
    values["tree"] = {**listed, "num_candidates": count, "size": size}
    path.write_text(json.dumps(values))
    read = Manifest.read(folder).tree
    scores = np.random.default_rng(0).normal(size=(STREAMS, 9))
    assert not read.is_conditional
    tokens = mx.arange(STREAMS * count).reshape(STREAMS, count)
    logprobs = mx.array(-np.sort(np.exp(scores[:, :count])), mx.float32)
    found, expected = (
        grow_tree(mx.array([99]), tokens, logprobs, config) for config in (read.config, tree)
    )
    for name in ("tokens", "depths", "paths"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()


def test_a_folder_whose_files_do_not_belong_together_is_refused(tmp_path):
    folder = write_export(tmp_path / "odd", num_nodes=float("inf"))
    assert str(folder) in refusal(Manifest.read, folder)
    folder = write_export(tmp_path / "out", target="coreai")
    line = refusal(exported.load, folder, compute_units="all")
    assert mentions(found_in(line), "compute_units")
    make_partial_manifest(digest=Manifest.read(folder).digest).write(folder)
    (folder / "model.mlpackage" / "weights").write_bytes(b"abd")
    assert "manifest.json" in refusal(exported.load, folder)
    (folder / "model.mlpackage" / "weights").unlink()
    (folder / "model.mlpackage").rmdir()
    assert "model.mlpackage" in refusal(exported.load, folder)


@pytest.mark.parametrize(("change", "named"), [
    ({"format": "ssmlx-export/0"}, ()), ({"num_nodes": 7}, ("6", "7")),
    ({"num_kept": 9}, ("9", "6")), ({"num_streams": 0}, ("0",)),
    ({"num_kept": 0}, ("0", "6")), ({"num_streams": 10**12}, (str(10**12),)),
    ({"chunk": 0}, ("0",)), ({"chunk": 7}, ("7", "40")),
    ({"num_slots": 4}, ("6", "4")), ({"num_slots": 44}, ("44",)),
    ({"cache_shape": [-1, 40]}, ("-1",)), ({"cache_shape": [40, 2**40]}, (str(2**40),)),
    ({"profile": "cpu"}, ("profile", "'cpu'")),
    ({"tree": {"num_candidates": 2**40, "size": 6}}, (str(2**40),)),
    ({"tree": {"num_candidates": 5, "size": 6, "width": 7}}, ("7", "5")),
    ({"tree": {"num_candidates": 0, "size": 6}}, ()), ({"tree": {}}, ()),
    ({"tree": {"num_candidates": 5, "size": 0}}, ()),
    ({"cache": "both"}, ("cache", "'both'")), ({"spare": 1}, ("spare",)),
    ({"num_nodes": 6.5}, ("num_nodes", "6.5")), ({"num_nodes": "6"}, ("num_nodes", '"6"')),
    ({"num_nodes": True}, ("num_nodes", "true")), ({"cache_names": "ab"}, ("cache_names", '"ab"')),
    ({"model": 5}, ("model", "5")), ({"versions": {"mlx": 1}}, ("versions", "1")),
    ({"tree": 3}, ("tree", "3")),
    ({"tree": {"num_candidates": 5, "size": 6, "is_conditional": "no"}}, ("is_conditional", "no")),
])  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(change, named, tmp_path):
    folder = write_export(tmp_path / "out")
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    line = found_in(refusal(Manifest.read, folder))
    assert str(folder) in line and mentions(line.replace(str(folder), ""), *named)
