"""Prompts that are processed once: warm answers are the cold ones, in memory and from disk."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Thread

import ssmlx  # first: it prefers OpenBLAS

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from loops import plain_tokens
from real import ROOT, snapshot, tokens_of, words
from refusals import exits, found_in, mentions, refusal
from tiny import (
    LATENT,
    RESIDUAL,
    VOCAB,
    first_tokens,
    make_adapter,
    make_base,
    make_model,
    make_tokenizer,
    slow,
    token_steps,
)
from tiny_heads import make_heads

from ssmlx.commands import caches, chat, generate
from ssmlx.decoding.sampling import Sampling
from ssmlx.drafters.draft_model import DraftModel
from ssmlx.drafters.text_index import EarlierAnswers
from ssmlx.errors import InputError
from ssmlx.loading.attach import attach_adapter, swap_adapter
from ssmlx.loading.identity import CacheKey
from ssmlx.mlx_thread import run_on_mlx_thread
from ssmlx.model.backbone import Backbone
from ssmlx.model.state_cache import StateCache
from ssmlx.model.streams import StreamFusedModel
from ssmlx.prompt_cache import PromptCache
from ssmlx.prompt_cache.prompt_files import read_prompt
from ssmlx.prompt_cache.unfinished_files import delete_unfinished_files
from ssmlx.settings import GenerateConfig, LookaheadConfig, TreeConfig

LENGTH = 10


@lru_cache(maxsize=4)
def model_of(scope="streams", seed=0):
    return make_model("llama", scope, seed=seed)


@lru_cache(maxsize=1)
def drafters():
    backbone = StreamFusedModel(Backbone(make_base())).backbone
    small = LookaheadConfig(window=3, ngram=3, guesses=3)
    return {
        "plain": {"decoding": "plain"},
        "second-pass": {"drafter": "streams", "stream_schedule": "second-pass"},
        "fused": {"drafter": "streams", "stream_schedule": "fused", "tree": TreeConfig(size=8)},
        "prompt-lookup": {"drafter": "prompt-lookup"},
        "lookahead": {"drafter": "lookahead", "lookahead": small},
        "draft-model": {"drafter": DraftModel(make_base(seed=50))},
        "medusa": {"drafter": make_heads("medusa", backbone)},
        "mlp-speculator": {"drafter": make_heads("mlp-speculator", backbone)},
    }


def text(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def cold(model, tokens, **settings):
    sampling = Sampling(GenerateConfig(**settings), VOCAB)
    return run_on_mlx_thread(lambda: plain_tokens(model, tokens, LENGTH, sampling))


def written_by(model, tokens, cache, **settings):
    """The first tokens of an answer, on the thread that runs MLX."""
    return run_on_mlx_thread(
        lambda: first_tokens(token_steps(model, tokens, cache, **settings), LENGTH)[0]
    )


def warm(prompts, model, tokens, **settings):
    """An answer, which is kept with its prompt, and how many of the prompt's tokens were known."""
    cache, known = prompts.take(model, tokens)
    assert cache.offset == known < len(tokens)
    answer = written_by(model, tokens[known:], cache, context=tokens[:known], **settings)
    prompts.put(model, [*tokens, *answer], cache)
    return answer, known


def rows_of(cache):
    rows = cache.rows(cache.offset)
    return [np.array(array.astype(mx.float32)) for own in rows for array in own]


@pytest.mark.parametrize("name", ["plain", "second-pass", "draft-model"])
def test_a_warm_answer_is_the_cold_one(name):
    """Whoever drafts: nobody, on the device, or by a cache of its own."""
    model = model_of()
    prompts = PromptCache()
    settings = drafters()[name]
    start = text(40)
    other = text(300, seed=1)
    answer = cold(model, start)
    cases = {  # a prompt, and how many of its tokens are known by then
        "the first": (start, 0),
        "the second time": (start, 39),
        "longer, with its answer": ([*start, *answer[:-1], 3, 4], 40 + LENGTH - 1),
        "shorter": (start[:17], 16),
        "partly the same": ([*start[:20], *text(30, seed=2)], 20),
        "another": (other, 0),
        "one token": (start[:1], 0),
        "the first again": (start, 39),
    }
    for case, (tokens, expected) in cases.items():
        found, known = warm(prompts, model, tokens, **settings)
        assert found == cold(model, tokens), case
        # How far an answer's tokens are in the cache is the drafter's to say.
        assert known == expected or (case.startswith("longer") and known > 40), case


SAMPLED = {"temp": 1.0, "seed": 3, "repetition_penalty": 1.3}


@pytest.mark.parametrize("sampling", [{}, *slow(SAMPLED)])
def test_drafters_take_over_from_each_other(sampling):
    """All of them, in an order and its reverse: each grows the same text by its own answer."""
    model = model_of()
    for names in (list(drafters()), list(drafters())[::-1]):
        prompts = PromptCache()
        tokens = text(30, seed=5)
        for turn, name in enumerate(names):
            answer, known = warm(prompts, model, tokens, **drafters()[name], **sampling)
            assert answer == cold(model, tokens, **sampling), name
            assert known == 0 if turn == 0 else known >= len(tokens) - 8
            tokens = [*tokens, *answer, 1 + turn]


def test_a_full_context_is_warm_too():
    model = model_of()
    tokenizer = make_tokenizer()
    tokens = text(505)
    for decoding in ("plain", "speculative", "plain"):
        prompts = PromptCache()
        for known in (0, 504):
            cache, found = prompts.take(model, tokens)
            assert found == known
            settings = {"decoding": decoding, "max_tokens": 100}
            settings |= {"cache": cache, "context": tokens[:known]}
            responses = list(ssmlx.stream_generate(model, tokenizer, tokens[known:], **settings))
            assert responses[-1].finish_reason == "context"
            assert responses[-1].cached_tokens == known
            prompts.put(model, tokens, cache)


def test_who_takes_a_prompt_changes_it_for_nobody():
    model = model_of()
    prompts = PromptCache()
    tokens = text(300)
    warm(prompts, model, tokens)
    first, _ = prompts.take(model, tokens)
    before = rows_of(first)
    one, two = ([*tokens[:-1], *text(9, seed)] for seed in (7, 8))
    mixed = []
    for prompt in (one, two):  # both at once, a step each in turns
        cache, known = prompts.take(model, prompt)
        assert known >= len(tokens) - 1
        mixed.append(token_steps(model, prompt[known:], cache, decoding="plain"))
    turns = [
        run_on_mlx_thread(lambda: [next(steps).tokens[0] for steps in mixed]) for _ in range(LENGTH)
    ]
    answers = list(zip(*turns, strict=True))
    assert [list(answer) for answer in answers] == [cold(model, one), cold(model, two)]
    again, _ = prompts.take(model, tokens)
    for rows in (rows_of(first), rows_of(again)):
        assert all(np.array_equal(a, b) for a, b in zip(rows, before, strict=True))


def test_the_longest_unused_goes_first_and_may_still_be_in_use():
    model = model_of()
    length = 300
    unit = PromptCache()
    warm(unit, model, text(length))
    prompts = PromptCache(max_bytes=2 * unit.nbytes)
    a, b, c = (text(length, seed) for seed in (1, 2, 3))
    warm(prompts, model, a), warm(prompts, model, b)
    in_use, known = prompts.take(model, b)
    warm(prompts, model, a)  # now b is the longest unused
    warm(prompts, model, c)
    assert len(prompts) == 2 and prompts.nbytes <= prompts.max_bytes
    assert prompts.take(model, a)[1] == prompts.take(model, c)[1] == length - 1
    assert prompts.take(model, b)[1] == 0
    assert written_by(model, b[known:], in_use, context=b[:known]) == cold(model, b)
    tiny = PromptCache(max_bytes=unit.nbytes // 2)  # too large for it: nobody else is thrown out
    warm(tiny, model, a[:30])
    warm(tiny, model, b)
    assert tiny.take(model, a[:30])[1] == 29 and tiny.take(model, b)[1] == 0


def test_answers_of_another_model_may_begin_while_bytes_are_counted(monkeypatch):
    prompts = PromptCache()
    count = EarlierAnswers.nbytes.fget
    begins = []

    def count_slowly(answers):
        """Leave another thread time to begin answers while these are counted."""
        if not begins:
            begins.append(Thread(target=run_on_mlx_thread, args=[lambda: prompts.answers(other)]))
            begins[0].start()
            begins[0].join(0.1)
        return count(answers)

    model, other = model_of(), model_of(seed=5)
    prompts.answers(model)
    expected = prompts.nbytes
    monkeypatch.setattr(EarlierAnswers, "nbytes", property(count_slowly))
    assert prompts.nbytes == expected  # a dictionary that grows while it is read raises
    begins[0].join()


def test_what_another_extends_is_dropped_and_bytes_are_those_held():
    model = model_of()
    prompts = PromptCache()
    tokens = text(300)
    warm(prompts, model, tokens[:250], decoding="speculative")
    warm(prompts, model, tokens, decoding="speculative")
    warm(prompts, model, tokens[:100], decoding="speculative")
    assert len(prompts) == 3  # their answers differ
    cache, _ = prompts.take(model, tokens)
    prompts.put(model, tokens[:-1], cache)
    assert len(prompts) == 3  # it is covered
    mx.clear_cache()
    before = mx.get_active_memory()
    held = prompts.nbytes
    del cache
    prompts.close()
    assert prompts.nbytes == len(prompts) == 0
    assert before - mx.get_active_memory() == pytest.approx(held, rel=0.05)  # pages


def test_prompts_belong_to_weights_and_to_lora_on_every_row():
    backbone = Backbone(make_base())
    base = StreamFusedModel(backbone)
    streams, lora = (make_adapter(backbone, scope, **RESIDUAL) for scope in ("streams", "all"))
    other = make_adapter(backbone, "all", seed=9)
    for key_of in (CacheKey.of, CacheKey.in_files):
        key = key_of(base)
        chat = attach_adapter(backbone, streams, merge_lora=True)
        assert key_of(chat) == key
        sql = swap_adapter(chat, lora, merge_lora=True)
        merged = key_of(sql)
        apart = swap_adapter(sql, lora, merge_lora=False)
        assert key_of(apart) == merged and merged.lora != key.lora
        assert merged.weights == key.weights
        assert key_of(swap_adapter(apart, other)).lora not in (key.lora, merged.lora)
    half = make_base()
    half.set_dtype(mx.float16)
    assert CacheKey.of(StreamFusedModel(Backbone(half))).dtype == "float16"


def test_models_share_a_cache_and_each_finds_its_own():
    prompts = PromptCache()
    tokens = text(30)
    for model in (model_of("all"), model_of("streams"), model_of("all", seed=3)):
        for known in (0, 29):
            answer, found = warm(prompts, model, tokens)
            assert (answer, found) == (cold(model, tokens), known)
    base = swap_adapter(model_of("streams"), None)
    answer, known = warm(prompts, base, tokens)  # what `streams` left is the base's own
    assert known == 29 and answer == cold(base, tokens)


def written(folder):
    return sorted(path for path in folder.iterdir() if path.suffix == ".safetensors")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_folder_outlives_the_process(tmp_path, dtype):
    base = make_base()
    base.set_dtype(dtype)
    model = StreamFusedModel(Backbone(base))
    tokens = text(60)
    folder = tmp_path / "a" / "prompts"
    with PromptCache(folder=folder) as first:
        answer, _ = warm(first, model, tokens, decoding="plain")
        assert not folder.exists()
        rows = rows_of(first.take(model, tokens)[0])
    (path,) = written(folder)
    assert path.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    second = PromptCache(folder=folder)
    cache, known = second.take(model, tokens)
    assert known == len(tokens) - 1
    assert all(np.array_equal(a, b) for a, b in zip(rows, rows_of(cache), strict=True))
    assert warm(second, model, tokens, decoding="plain")[0] == answer
    path.unlink()
    assert second.take(model, tokens)[1] == len(tokens) - 1  # it is in memory now
    other = PromptCache(folder=folder)
    assert other.take(model_of(seed=5), tokens)[1] == 0


@pytest.mark.parametrize("name", ["deepseek_v3", *slow("glm4_moe_lite")])
def test_latent_attention_is_kept_too(name, tmp_path):
    """Keys and values of different widths, in memory and in files."""
    model = StreamFusedModel(Backbone(make_base(name, **LATENT)))
    start = text(40)
    with PromptCache(folder=tmp_path) as prompts:
        warm(prompts, model, start, drafter="prompt-lookup")
    for tokens, expected in ((start, 39), ([*start[:20], *text(30, seed=2)], 20)):
        answer, known = warm(PromptCache(folder=tmp_path), model, tokens, drafter="prompt-lookup")
        assert (answer, known) == (cold(model, tokens), expected)
    whole = written(tmp_path)[0]
    narrow = damaged(whole, **{"layers.0.values": lambda rows: rows[..., :4]})
    assert "layers.0.values (1, 1, " in refusal(read_prompt, narrow, model)
    assert str(whole) in refusal(read_prompt, whole, model_of())


def test_the_longer_of_memory_and_folder_counts(tmp_path):
    model = model_of()
    tokens = text(120)
    long = PromptCache(folder=tmp_path)
    short = PromptCache(folder=tmp_path)
    warm(short, model, tokens[:50])
    warm(long, model, tokens)
    long.flush(), long.flush()
    for prompt, expected in ((tokens, 119), (tokens[:50], 49), ([*tokens[:80], 1, 2, 3], 80)):
        answer, known = warm(short, model, prompt)
        assert (answer, known >= expected) == (cold(model, prompt), True)
    short.close()
    longest = PromptCache(folder=tmp_path)
    assert longest.take(model, [*tokens, *cold(model, tokens)])[1] >= 120


def test_a_model_that_is_called_as_a_whole_now_reads_no_file(tmp_path, monkeypatch):
    """Of its layers run one by one, as another mlx-lm's were: they give other logits now."""
    tokens = text(20)
    with PromptCache(folder=tmp_path) as prompts:
        prompts.put(model_of(), tokens, fill(model_of(), tokens))

    def refuse(stages):
        raise InputError("other logits", expected="its own", do="call it as a whole")

    monkeypatch.setattr("ssmlx.model.backbone.check_stages", refuse)
    whole = StreamFusedModel(Backbone(make_base()))
    cache, known = PromptCache(folder=tmp_path).take(whole, tokens)
    assert known == 0 and isinstance(cache, StateCache)


def test_a_folder_is_bounded_and_what_another_extends_is_dropped(tmp_path):
    model = model_of()
    texts = [text(100, seed) for seed in range(4)]
    caches = [model.make_cache() for _ in texts]
    one = PromptCache(folder=tmp_path)
    for tokens, cache in zip(texts, caches, strict=True):
        written_by(model, tokens, cache, decoding="plain")
        one.put(model, tokens[:60], cache)
    one.flush()
    size = written(tmp_path)[0].stat().st_size
    assert len(written(tmp_path)) == 4
    for age, path in enumerate(written(tmp_path)):
        os.utime(path, (age, age))
    one.put(model, texts[0], caches[0])
    one.flush()  # longer than one of the four
    assert len(written(tmp_path)) == 4
    for seed in range(10, 13):
        two = PromptCache(folder=tmp_path, max_disk_bytes=2 * size)
        two.put(model, text(60, seed), fill(model, text(60, seed)))
        two.close()
        files = written(tmp_path)
        assert sum(path.stat().st_size for path in files) <= 2 * size + 1000
        assert PromptCache(folder=tmp_path).take(model, text(60, seed))[1] == 59


def test_the_file_of_another_model_is_neither_read_nor_deleted(tmp_path):
    model, tokens = model_of(), text(60)
    with PromptCache(folder=tmp_path) as prompts:
        prompts.put(model, tokens, fill(model, tokens))
    (path,) = written(tmp_path)
    assert PromptCache(folder=tmp_path).take(model_of(seed=5), tokens)[1] == 0
    assert written(tmp_path) == [path]
    assert PromptCache(folder=tmp_path).take(model, tokens)[1] == 59


def test_a_file_is_not_read_if_the_memory_has_as_much(tmp_path):
    model, tokens = model_of(), text(60)
    prompts = PromptCache(folder=tmp_path)
    prompts.put(model, tokens, fill(model, tokens))
    prompts.flush()
    (path,) = written(tmp_path)
    os.utime(path, (1, 1))  # a file that is read is marked as used
    assert prompts.take(model, tokens)[1] == 59 and path.stat().st_mtime == 1


def test_a_prompt_larger_than_its_folder_may_be_drives_no_other_out(tmp_path):
    model = model_of()
    small, large = text(20), text(300, seed=2)
    with PromptCache(folder=tmp_path) as prompts:
        prompts.put(model, small, fill(model, small))
    (path,) = written(tmp_path)
    with PromptCache(folder=tmp_path, max_disk_bytes=2 * path.stat().st_size) as prompts:
        prompts.put(model, large, fill(model, large))
    assert written(tmp_path) == [path]


def fill(model, tokens):
    cache = model.make_cache()
    written_by(model, tokens, cache, decoding="plain")
    return cache


def damaged(path, **changes):
    """A copy of a prompt file with other metadata, or arrays."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    to = path.with_name("damaged.safetensors")
    changed = {name: change(arrays[name]) for name, change in changes.items() if name in arrays}
    metadata |= {name: text for name, text in changes.items() if name not in arrays}
    mx.save_safetensors(str(to), {**arrays, **changed}, metadata)
    return to


DAMAGES = {
    "another format": ({"format": "ssmlx-prompt/0"}, ("'ssmlx-prompt/0'",)),
    "a model": ({"model": "qwen2"}, ("qwen2",)),
    "a dtype": ({"dtype": "float16"}, ("float16", "float32")),
    "weights": ({"weights": "abc"}, ("weights", "abc")),
    "LoRA": ({"lora": "abc"}, ("LoRA", "abc")),
    "no tokens": ({"tokens": ""}, ("token",)),
    "tokens of words": ({"tokens": "1,x"}, ("token",)),
    "tokens below": ({"tokens": "1,-1"}, ("token",)),
    "tokens above": ({"tokens": "1,99"}, ("99", "13")),
    "tokens beyond": ({"tokens": f"{2**70}"}, ("13",)),
    "digits": ({"tokens": "9" * 5000}, ("token",)),
    "more tokens": ({"tokens": ",".join(["1"] * 600)}, ("600",)),
    "fewer tokens": ({"tokens": "1,2"}, ("layers.0 (2, 2, 30, 8)", "(2, 2, 2, 8)")),
    "a type": ({"layers.1": lambda rows: rows.astype(mx.float16)}, ("float16", "float32")),
    "a shape": ({"layers.2": lambda rows: rows[:, :1]}, ("layers.2 (2, 1, 30, 8)",)),
    "NaN": ({"layers.0": lambda rows: rows * float("nan")}, ("layers.0",)),
    "infinity": ({"layers.0": lambda rows: rows + float("inf")}, ("layers.0",)),
}
"""What is changed in a file, and what the line that refuses it names."""


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    model = model_of()
    tokens = text(30)
    folder = tmp_path_factory.mktemp("prompts")
    with PromptCache(folder=folder) as prompts:
        prompts.put(model, tokens, fill(model, tokens))
    return written(folder)[0]


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_is_named(prompt_file, name):
    changes, named = DAMAGES[name]
    line = refusal(read_prompt, damaged(prompt_file, **changes), model_of())
    assert all(one in line for one in named), line


def test_what_is_no_prompt_is_refused_by_its_header(prompt_file, tmp_path):
    whole = prompt_file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["layers.0"]["shape"][2] = 2**62
    absurd = json.dumps(header).encode()
    cases = {
        "empty": b"", "no safetensors": b"hello" * 99, "a header beyond": whole[:40],
        "truncated": whole[:-1], "half": whole[: len(whole) // 2], "longer": whole + b"x",
        "an absurd header": b"\xff" * 8 + whole[8:],
        "absurd sizes": len(absurd).to_bytes(8, "little") + absurd + whole[8 + length :],
    }  # fmt: skip
    for case, content in cases.items():
        path = tmp_path / "prompt"
        path.write_bytes(content)
        assert str(path) in refusal(read_prompt, path, model_of()), case
    # A folder goes on without what is damaged; a file in its place is as good as an empty one.
    with PromptCache(folder=path) as prompts:
        assert warm(prompts, model_of(), text(30))[1] == 0
    path.rename(tmp_path / prompt_file.name)
    with PromptCache(folder=tmp_path) as prompts:
        assert warm(prompts, model_of(), text(30))[1] == 0
    assert PromptCache(folder=tmp_path).take(model_of(), text(30))[1] == 29
    bad = damaged(prompt_file, **DAMAGES["NaN"][0]).rename(tmp_path / f"{'0' * 32}.safetensors")
    written(tmp_path)[1].unlink()
    with PromptCache(folder=tmp_path) as prompts:
        assert warm(prompts, model_of(), text(30))[1] == 0 and not bad.exists()


WRITER = """
import os, signal, sys, time
sys.path.insert(0, "tests")
import ssmlx, mlx.core as mx
from test_prompt_cache import fill, model_of, text
from ssmlx.prompt_cache import PromptCache, unfinished_files
folder, point, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
save = mx.save_safetensors
def stop(*_):
    print("stopped", flush=True)
    time.sleep(60)
def half(file, *rest):
    save(file, *rest)
    file.truncate(file.tell() // 2)
    stop()
mx.set_default_device(mx.cpu)
if point == "half":
    mx.save_safetensors = half
if point == "fsync":
    unfinished_files.os.fsync = stop
for seed in range(first, first + count):
    with PromptCache(folder=folder, max_disk_bytes=200_000) as prompts:
        prompts.put(model_of(), text(60, seed), fill(model_of(), text(60, seed)))
"""


def writer(folder, point, first=100, count=1):
    command = [sys.executable, "-c", WRITER, str(folder), point, str(first), str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["half", "fsync"])
def test_a_killed_writer_leaves_whole_files_alone(tmp_path, point):
    model = model_of()
    tokens = text(60)
    with PromptCache(folder=tmp_path) as prompts:
        prompts.put(model, tokens, fill(model, tokens))
    before = snapshot(tmp_path)
    process = writer(tmp_path, point)
    assert process.stdout.readline() == "stopped\n"
    left = set(snapshot(tmp_path)) - set(before)
    assert len(left) == 1
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    delete_unfinished_files(tmp_path)
    assert set(snapshot(tmp_path)) - set(before) == left  # it is being written
    process.send_signal(signal.SIGKILL)
    process.communicate()
    after = PromptCache(folder=tmp_path)
    assert after.take(model, tokens)[1] == 59 and after.take(model, text(60, 100))[1] == 0
    after.put(model, text(60, 7), fill(model, text(60, 7)))
    after.close()
    assert not left & set(snapshot(tmp_path)) and len(written(tmp_path)) == 2


@pytest.mark.slow
def test_two_processes_write_into_one_folder(tmp_path):
    writers = [writer(tmp_path, "none", first, 12) for first in (100, 106)]
    assert [process.wait(120) for process in writers] == [0, 0]
    files = written(tmp_path)
    assert sum(path.stat().st_size for path in files) <= 200_000 and len(files) > 3
    assert all(read_prompt(path, model_of()) for path in files)
    assert list(tmp_path.iterdir()) == files or sorted(tmp_path.iterdir()) == files


def test_prompts_are_listed_and_purged(prompt_file, tmp_path, capsys):
    (tmp_path / prompt_file.name).write_bytes(prompt_file.read_bytes())
    (inner := tmp_path / ("0" * 16)).mkdir()  # of a key of a server's
    (inner / f"{'0' * 32}.safetensors").write_bytes(b"x")
    mine = tmp_path / "model.safetensors"
    mine.write_bytes(prompt_file.read_bytes())
    assert caches.main(["list", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert caches.main([str(tmp_path)]) == 0 and capsys.readouterr().out == out
    assert any(mentions(line, "30", "llama", "3", "32", "float32") for line in out.splitlines())
    assert mentions(out, "0" * 32) and mentions(out.splitlines()[-1], "2")
    line = exits(capsys, caches.main, "purge", tmp_path)  # there is nobody to ask
    assert mentions(line, "--yes")
    assert (inner / f"{'0' * 32}.safetensors").exists()
    assert caches.main(["purge", "--yes", str(tmp_path)]) == 0
    assert {*tmp_path.rglob("*")} == {mine, inner}
    capsys.readouterr()
    for given in (("list", tmp_path / "nowhere"), ("list",), ("purge",)):
        assert mentions(exits(capsys, caches.main, *given), str(given[-1]))


def test_a_folder_of_prompts_is_always_named(capsys):
    """Nothing keeps any unless it is given a folder."""
    assert mentions(exits(capsys, caches.main), "FOLDER")


def generated(capsys, base, *args):
    common = ["--model", str(base), "--dtype", "float32", "--max-tokens", "6", "--jsonl"]
    common += ["--template", "raw"]
    assert generate.main([*common, *args]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line["tokens"] for line in lines]


@pytest.mark.slow
def test_an_engine_is_warm_from_what_another_left(base, folders, tmp_path):
    """Threads ask at once while prompts are thrown out of memory, onto disk, and read again."""
    texts = [words(40, first) for first in (0, 0, 7, 14)]
    asked = [(adapter, text) for adapter in folders for text in texts] * 2

    def engine(**bounds):
        prompts = PromptCache(folder=tmp_path / "prompts", **bounds)
        return ssmlx.Engine(str(base), dtype="float32", prompt_cache=prompts)

    def heard(engine, adapter, text):
        with engine.stream(text, adapter=folders[adapter], max_tokens=6) as answer:
            segments = list(answer)
        engine.prompt_cache.flush()
        return tokens_of(segments), segments[-1].prompt_tokens - segments[-1].cached_tokens

    with ssmlx.Engine(str(base), dtype="float32") as other:
        other.prompt_cache.max_bytes = 0
        expected = {key: heard(other, *key)[0] for key in set(asked)}
    with (
        engine(max_bytes=300_000, max_disk_bytes=2_000_000) as first,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda key: heard(first, *key)[0], asked))
        assert answers == [expected[key] for key in asked]
        models = {first.model(folder) for folder in folders.values()}
        kept = {id(one): one for one in map(first.prompt_cache.answers, models)}
        answers = sum(one.nbytes for one in kept.values())
        assert 0 < answers < first.prompt_cache.nbytes <= 300_000 + answers
    with engine() as second:
        assert [heard(second, *key) for key in asked] == [(expected[key], 1) for key in asked]


def test_generate_keeps_its_prompt(base, folders, tmp_path, capsys, monkeypatch):
    path = tmp_path / "kept"
    known = []
    stream_generate = ssmlx.api.stream_generate

    def spy(*args, **kwargs):
        known.append(len(kwargs["context"]))
        return stream_generate(*args, **kwargs)

    monkeypatch.setattr(ssmlx.api, "stream_generate", spy)
    keep = ("--prompt-cache", str(path))
    prompt = words(20)
    cold = generated(capsys, base, "--prompt", prompt)
    known.clear()
    assert generated(capsys, base, "--prompt", prompt, *keep) == cold
    assert path.stat().st_mode & 0o777 == 0o600
    first = path.read_bytes()
    streams = ("--adapter", folders["streams"])
    assert generated(capsys, base, "--prompt", prompt, *keep, *streams) == cold
    assert generated(capsys, base, "--prompt", words(6), *keep)
    assert path.read_bytes() == first  # the file has all of it
    longer = generated(capsys, base, "--prompt", words(30), *keep)
    assert longer == generated(capsys, base, "--prompt", words(30))
    assert path.read_bytes() != first
    many = tmp_path / "many.jsonl"
    texts = [f"{words(12)} {words(4, seed)}" for seed in (3, 20, 40)]
    many.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    other = ("--prompts", str(many), "--prompt-cache", str(tmp_path / "many"))
    assert generated(capsys, base, *other) == generated(capsys, base, "--prompts", str(many))
    assert known == [0, 19, 5, 20, 0, 0, 12, 12, 0, 0, 0]
    lora = [*keep, "--adapter", str(folders["all"]), "--prompt", prompt]
    given = ("--model", base, "--dtype", "float32", *lora)
    assert mentions(found_in(exits(capsys, generate.main, *given)), "LoRA")


def test_a_chat_goes_on_where_another_one_left(base, folders, tmp_path, monkeypatch, capsys):
    path = tmp_path / "kept"

    def chatted(*lines, args=("--prompt-cache", str(path))):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        command = ["--model", str(base), "--dtype", "float32", "--max-tokens", "6"]
        assert chat.main([*command, *args]) == 0
        return capsys.readouterr()

    turns = (words(20), words(5, 30))
    cold = chatted(*turns, args=()).out
    first = chatted(*turns)
    assert first.out == cold
    last = first.err.splitlines()[-1]
    kept = int(re.search(r"\d+", last)[0])
    assert str(path) in last and kept >= 20 + 5 + 6 + 5 and path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    again = chatted(turns[0], "/stats", "/quit")  # the file has all of this
    assert again.out == cold.splitlines()[0] + "\n" and path.read_bytes() == before
    (begun,) = [line for line in again.err.splitlines() if str(path) in line]
    assert mentions(begun, str(kept)) and mentions(again.err, "22", "23")
    swapped = chatted(*turns, f"/set adapter {folders['all']}", "w1 w2")
    assert swapped.out.startswith(cold) and path.read_bytes() == before
    nothing = chatted(turns[0], "/clear")
    assert nothing.err.count(str(path)) == 1 and path.read_bytes() == before
    assert str(path) in chatted("w9 w8").err and path.read_bytes() != before


@pytest.mark.parametrize("place", ["folder", "no/where", "text"])
def test_a_file_that_cannot_be_kept_is_refused_before_anything_is_loaded(tmp_path, capsys, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello")
    path = str(tmp_path / place)
    for command in (generate, chat):
        args = ["--model", "/nowhere", "--prompt-cache", path]
        ask = ["--prompt", "w1"] if command is generate else []
        line = exits(capsys, command.main, *args, *ask)
        assert path in line and "/nowhere" not in line
