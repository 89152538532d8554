"""Where the memory goes: every part against what MLX says, and drafting's peak."""

import gc
import re

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from real import ROOT, write_base, write_tiny_adapter
from tiny import LAYERS, make_adapter, make_base, make_lora, make_model, make_tokenizer
from tiny_heads import HEAD_KINDS, make_heads

from ssmlx.api import stream_generate
from ssmlx.commands.chat_answers import Chat
from ssmlx.commands.chat_commands import carry_out
from ssmlx.commands.chat_screen import Screen
from ssmlx.decoding.loop import prefill
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.generation import segments
from ssmlx.generation.memory import MIB, Memory, measure_memory
from ssmlx.loading.attach import attach_adapter
from ssmlx.model.backbone import Backbone
from ssmlx.model.cache import TreeCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompts import encode_prompt, read_prompts
from ssmlx.session import ChatSession
from ssmlx.settings import GenerateConfig, TreeConfig

PROMPT = [3, 1, 4, 1, 5]
VOCAB = 512
DRAFT_VOCAB = 40
WIDTH = 128
# Large enough that MLX's rounding of small arrays does not count.
SIZES = {"hidden_size": WIDTH, "intermediate_size": 256, "head_dim": 32, "vocab_size": VOCAB}
TREE = TreeConfig(kind="best", size=12)


@pytest.fixture
def exact():
    """No buffer is used again for a smaller array, which MLX would count at its full size."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def settled() -> int:
    """Bytes in use once all that was asked for is done and nothing is left behind."""
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


def loaded(scope: str, *, packed: bool, merge: bool = True, tied: bool = False):
    """A model with streams that draft from a vocabulary of their own, and all of it in memory."""
    base = make_base(tie_word_embeddings=tied, **SIZES)
    if packed:
        nn.quantize(base, group_size=32, bits=4)
    backbone = Backbone(base)
    mx.eval(base.parameters())
    adapter = make_adapter(backbone, scope, prune_rank=0, draft_vocab=range(DRAFT_VOCAB))
    return attach_adapter(backbone, adapter, merge_lora=merge)


def last_of(responses):
    for last in responses:
        if last.finish_reason:
            return last
    raise AssertionError("the answer has no end")


@pytest.mark.parametrize(("scope", "packed", "schedule"), [
    ("all", False, "second-pass"), ("all", True, None), ("streams", True, "fused"),
])  # fmt: skip
def test_the_parts_are_what_is_in_use(exact, scope, packed, schedule, monkeypatch):
    before = settled()
    model = loaded(scope, packed=packed)
    weights = settled() - before
    config = GenerateConfig(decoding="plain", max_tokens=16)
    if schedule:
        config = GenerateConfig(max_tokens=16, tree=TREE, stream_schedule=schedule)
    responses = stream_generate(model, make_tokenizer(VOCAB), PROMPT, config)
    seen = []  # where the memory is told, for the answer is gone when its last segment is read
    told = segments.measure_memory
    monkeypatch.setattr(
        segments, "measure_memory", lambda *args: seen.append(settled()) or told(*args)
    )
    memory = last_of(responses).memory
    in_use = seen[0] - before
    assert memory.weights == pytest.approx(weights, rel=0.02)
    # The last call's hidden states stay until the next: of its nodes twice, and of their streams.
    streams = {None: 0, "second-pass": 0, "fused": model.num_streams}[schedule]
    hidden = TREE.size * (2 + streams) * 4 * WIDTH if schedule else 0
    parts = memory.held - memory.weights + hidden
    assert parts == pytest.approx(in_use - weights, rel=0.04)
    assert min(memory.draft_head, memory.streams, memory.lora, memory.cache) > 0
    assert (memory.tree > 0) == (schedule is not None)
    assert (memory.second_pass > 0) == (schedule is not None)
    assert memory.peak >= in_use
    # Nor does the step stay that was built ahead and is not run, whose masks hold its cache.
    del responses
    assert settled() - before - weights < memory.cache / 10


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_head_is_its_rows_of_the_head(tied, packed):
    model = loaded("all", packed=packed, tied=tied)
    memory = measure_memory(model, model.make_cache())
    scales = 2 * 4 * WIDTH // 32  # and biases
    assert memory.draft_head == DRAFT_VOCAB * (WIDTH // 2 + scales if packed else 4 * WIDTH)
    embeddings = 3 * WIDTH * 4
    ids = DRAFT_VOCAB * 4
    assert memory.streams == embeddings + ids


def test_merged_lora_is_part_of_the_base_and_what_it_replaced_is_told():
    """Without a folder to read them from again, the original weights are kept beside."""
    plain = measure_memory(StreamFusedModel(Backbone(make_base(**SIZES))), TreeCache(LAYERS))
    merged = measure_memory(loaded("all", packed=False), TreeCache(LAYERS))
    apart = measure_memory(loaded("all", packed=False, merge=False), TreeCache(LAYERS))
    assert merged.base == apart.base == plain.base
    lora = make_lora(make_base(**SIZES), LAYERS - 2, 1)
    assert apart.lora == sum(w.a.nbytes + w.b.nbytes for w in lora.values())
    modules = dict(make_base(**SIZES).named_modules())
    assert merged.lora == sum(modules[path].weight.nbytes for path in lora)


def test_a_prompt_computes_no_logits(exact):
    """Neither of its whole pieces nor of their last tokens: they would be the largest arrays."""
    vocab = 20_000
    model = StreamFusedModel(Backbone(make_base(vocab=vocab, num_hidden_layers=1)))
    cache = model.make_cache()
    cache.reserve(more_tokens=512)
    before = settled()
    mx.reset_peak_memory()
    prefill(model, [1, 2, 3, 4] * 128, cache)
    assert mx.get_peak_memory() - before < 512 * vocab * 4 / 4


def test_a_draft_model_and_its_cache_are_told():
    model = loaded("all", packed=False)
    draft = DraftModel(make_base(seed=5, **SIZES))
    weights = sum(array.nbytes for _, array in tree_flatten(draft.model.parameters()))
    responses = stream_generate(
        model,
        make_tokenizer(VOCAB),
        PROMPT,
        decoding="speculative",
        drafter=draft,
        max_tokens=8,
    )
    memory = last_of(responses).memory
    cache = memory.drafter - weights
    assert cache == draft.cache_bytes > 0


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_are_told(exact, kind):
    backbone = loaded("all", packed=False).backbone
    before = settled()
    heads = make_heads(kind, backbone, vocab=[1, 2, 5, 7])
    assert heads.nbytes == pytest.approx(settled() - before, rel=0.02)
    memory = measure_memory(StreamFusedModel(backbone), TreeCache(LAYERS), loaded=[heads])
    assert memory.drafter == heads.nbytes


def test_the_line_and_the_table_name_the_parts_that_are_there():
    memory = Memory(base=100 * MIB, draft_head=18 * MIB, cache=12 * MIB, tree=MIB, peak=134 * MIB)
    assert memory.held == 131 * MIB and memory.passing == 3 * MIB
    assert re.findall(r"\d+\.\d", memory.line()) == ["134.0", "100.0", "18.0", "12.0", "1.0", "3.0"]
    rows = memory.table().splitlines()
    assert rows[0].split()[-2:] == ["100.0", "MiB"]
    assert rows[-1].split()[-2:] == ["134.0", "MiB"] and len(rows) == 6
    assert Memory(base=5, peak=3).passing == 0


def test_a_chat_tells_its_memory(tmp_path, capsys):
    base = write_base(tmp_path / "base")
    adapter = write_tiny_adapter(tmp_path / "adapter", base)
    loaded = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    session = ChatSession(*loaded, GenerateConfig(max_tokens=9, tree=TREE))
    chat = Chat(session, Screen(), None)
    assert carry_out("/memory", chat)
    unused = capsys.readouterr().err  # nothing was said yet
    list(session.reply("w1 w2"))
    assert carry_out("/memory", chat)
    rows = capsys.readouterr().err.splitlines()
    assert len(rows) >= 6 and len(rows) > len(unused.splitlines())
    assert all(re.search(r"\d", row) for row in rows)
    session.reset()
    assert session.memory.second_pass == 0


@pytest.mark.parametrize("closed_early", [False, True])
def test_weights_are_wired_while_an_answer_is_written(monkeypatch, closed_early):
    """What mlx-lm does on macOS: the recommended limit, and the old one again afterwards."""
    limits = [5]
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 7})
    monkeypatch.setattr(mx, "set_wired_limit", lambda new: limits.append(new) or limits[-2])
    model = make_model()
    responses, others = (
        stream_generate(model, make_tokenizer(), PROMPT, max_tokens=6) for _ in range(2)
    )
    assert limits == [5]
    next(responses), next(others)
    assert limits == [5, 7]
    if closed_early:
        responses.close()
    else:
        list(responses)
    assert limits == [5, 7]  # the other one is still open
    others.close()
    assert limits == [5, 7, 5]


def real_peaks(model, tokenizer, tree: TreeConfig, *, bare: bool) -> tuple[Memory, Memory]:
    """The memory of an answer streamed, and of a plain one, without the adapter where `bare`."""
    prompts = read_prompts(ROOT / "examples" / "data" / "sql_test_100.jsonl")
    tokens = encode_prompt(prompts[1], model, tokenizer)
    told = []
    for decoding in ("speculative", "plain"):
        config = GenerateConfig(decoding=decoding, max_tokens=64, tree=tree)
        settled()
        mx.clear_cache()
        mx.reset_peak_memory()
        told.append(last_of(stream_generate(model, tokenizer, tokens, config)).memory)
        model = ssmlx.swap_adapter(model, None) if bare else model
    return tuple(told)


@pytest.mark.slow
@pytest.mark.real
def test_speculative_decoding_takes_little_more_than_plain_decoding():
    """At most 3 % at the peak, weights included, where the same adapter is loaded.

    Beside plain decoding without an adapter it is more, by the draft head alone.
    """
    loaded = ssmlx.load("smollm2-135m-q4_1", adapter="sql", dtype="float32")
    memory, plain = real_peaks(*loaded, TreeConfig(), bare=False)
    assert memory.peak <= 1.03 * plain.peak, memory.line()
    bare = plain.peak - memory.draft_head - memory.streams
    assert memory.peak - memory.draft_head <= 1.03 * bare
    assert memory.passing < 8 * MIB  # a copy of the cache would be another 11


@pytest.mark.real
@pytest.mark.slow
def test_with_a_packed_draft_head_speculative_decoding_takes_little_more_than_the_base_alone():
    """At most 3 % at the peak, weights included, beside a model without any adapter.

    With 16 nodes it is 3.2: a row of logits is 0.2 MiB.
    """
    loaded = ssmlx.load("smollm2-135m-q4_1", adapter="sql", draft_head="8bit")
    streamed, plain = real_peaks(*loaded, TreeConfig(size=8), bare=True)
    assert streamed.peak <= 1.03 * plain.peak


@pytest.mark.parametrize("settings", [{"decoding": "speculative"}, {}, {"decoding": "plain"}])
def test_an_answer_leaves_nothing_for_the_garbage_collector(settings):
    """Its cache is freed with it: who waits for a collection may hold many of them meanwhile."""
    model = make_model()
    held = []
    gc.collect(), gc.disable()
    try:
        for _ in range(4):
            answer = ssmlx.stream_generate(
                model, make_tokenizer(), [3, 1], max_tokens=20, **settings
            )
            assert sum(len(segment.tokens) for segment in answer) > 1
            del answer
            held.append(mx.get_active_memory())
    finally:
        gc.enable()
    # A shape that is drafted for the first time leaves its constants.
    assert held[3] <= held[1] + 2**11
