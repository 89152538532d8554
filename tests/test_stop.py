"""Stop strings: found wherever they stand, held back, and gone from the text; nothing else is."""

import random
from collections import deque
from itertools import cycle

import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from real import answer, tokens_of
from refusals import found_in, mentions, refusal
from tiny import all_pairs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ssmlx
from ssmlx.decoding.step import Step
from ssmlx.generation.answer_end import AnswerText, StopChecker
from ssmlx.generation.segments import build_responses
from ssmlx.prompts import chat_tokens

TEXT = "Grüße 🎉\n\nab aab, aaab!\n日本語 end"
END = 9999
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LENGTH = 24


def byte_letters(text: str) -> str:
    ((letters, _),) = BYTES.pre_tokenize_str(text)
    return letters


def byte_tokenizer(pairs: bool) -> PreTrainedTokenizerFast:
    """A token a byte, or two, so that characters and stop strings begin inside of tokens."""
    letters = sorted({*byte_letters(TEXT), *byte_letters("abc")})
    words = letters + ([a + b for a in letters for b in letters] if pairs else [])
    merges = [(a, b) for a in letters for b in letters] if pairs else []
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    made.pre_tokenizer = BYTES
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter, or a byte of those that it does not know."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abdegruß,!"]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {
    "bytes": TokenizerWrapper(byte_tokenizer(False), BPEStreamingDetokenizer),
    "pairs": TokenizerWrapper(byte_tokenizer(True), BPEStreamingDetokenizer),
    "naive": TokenizerWrapper(byte_tokenizer(True), NaiveStreamingDetokenizer),
    "sentencepiece": TokenizerWrapper(sentencepiece_tokenizer(), SPMStreamingDetokenizer),
}


def told(kind, steps, stop, max_tokens=10**6, ahead=1):
    """The segments of an answer of these steps, whose tokens are taken so many calls before its
    reader comes, as in a batch."""
    take = StopChecker(AnswerText(TOKENIZERS[kind], stop), {END}, max_tokens).take

    def taken():
        unread = deque()
        for step in steps:
            unread.append(Step(tuple(step), take(step)))
            if unread[-1].part.is_last:
                break
            if len(unread) >= ahead:
                yield unread.popleft()
        yield from unread

    return list(build_responses(taken(), 1, 0, lambda reason: {"peak_memory": 0.0}))


def cut_at(tokens, rng, longest=5):
    """Steps of 1 to `longest` tokens."""
    while tokens:
        size = rng.randint(1, longest)
        yield tokens[:size]
        tokens = tokens[size:]


def encoded(kind, text=TEXT):
    return TOKENIZERS[kind].encode(text, add_special_tokens=False)


STOPS = (
    ["\n\n"], ["aab"], ["aaab"], ["🎉"], ["本"], [" "], ["e", "ß"], ["nd"], ["end", "語 en"],
    ["aab, aaab!\n", "zzz"], ["Grüße 🎉\n\nab aab, aaab!\n日本語 end"], ["G"],
)  # fmt: skip


@pytest.mark.parametrize("stop, kind", [*zip(STOPS, cycle(TOKENIZERS), strict=False)], ids=repr)
def test_an_answer_ends_where_a_stop_string_begins(kind, stop):
    tokens = encoded(kind)
    rng = random.Random(5)
    assert TOKENIZERS[kind].decode(tokens) == TEXT
    for needed in range(1, len(tokens) + 1):
        text = TOKENIZERS[kind].decode(tokens[:needed])
        found = [text.find(one) for one in stop if one in text]
        if found:
            break
    for ahead in (1, 1, 4):
        segments = told(kind, cut_at(tokens, rng), stop, ahead=ahead)
        assert "".join(one.text for one in segments) == TEXT[: min(found)]
        assert tokens_of(segments) == tokens[:needed]
        assert segments[-1].generation_tokens == needed
        assert [one.finish_reason for one in segments] == [None] * (len(segments) - 1) + ["stop"]
        assert text.find(str(segments[-1].stop)) == min(found)
        so_far = ""
        for one in segments:
            so_far += one.text
            assert TEXT.startswith(so_far)


@pytest.mark.parametrize(
    "kind, stop, ends",
    all_pairs(TOKENIZERS, [["aabb"], ["ende", "nd."], ["\n\n\n"], ["🎊"]], ["length", "stop"]),
)
def test_what_only_began_like_a_stop_string_is_given_out(kind, stop, ends):
    tokens = encoded(kind)
    rng = random.Random(3)
    full = [*tokens, END, 1] if ends == "stop" else [*tokens, 1, 1]
    segments = told(kind, cut_at(full, rng), stop, max_tokens=len(tokens) + (ends == "stop"))
    assert "".join(one.text for one in segments) == TEXT
    assert segments[-1].finish_reason == ends
    assert tokens_of(segments) == full[: len(tokens) + (ends == "stop")]


def test_a_stop_string_at_the_last_token_and_behind_the_end_token():
    tokens = encoded("bytes", "abc")
    (only,) = told("bytes", [tokens], ["c"], max_tokens=3)
    assert (only.text, only.finish_reason) == ("ab", "stop")
    (only,) = told("bytes", [[tokens[0], END, *tokens[1:]]], ["bc"])
    assert (only.text, only.tokens, only.finish_reason) == ("a", (tokens[0], END), "stop")
    (only,) = told("bytes", [tokens], ["bc", "c", "abc"])
    assert (only.text, only.finish_reason) == ("", "stop"), "of those complete, the first"


def test_what_may_begin_a_stop_string_is_held_back():
    segments = told("bytes", [[token] for token in encoded("bytes", "aaaba")], ["aab!"])
    assert [one.text for one in segments] == ["", "", "a", "", "aab"]
    assert sum(one.finish_reason is not None for one in segments) == 0


HOW = ({"decoding": "plain"}, {}, {"drafter": "prompt-lookup"}, {"drafter": "lookahead"})


@pytest.mark.parametrize("place", [1, 7, 12])
def test_plain_and_speculative_stop_at_the_same_token(loaded, place):
    model, tokenizer = loaded
    tokens, _ = answer(model, tokenizer, "w1 w2", max_tokens=LENGTH)
    stop = tokenizer.decode(tokens[place : place + 2])
    ends = next(n for n in range(LENGTH) if stop in tokenizer.decode(tokens[: n + 1]))
    for how in HOW:
        segments = list(
            ssmlx.stream_generate(model, tokenizer, "w1 w2", max_tokens=LENGTH, stop=stop, **how)
        )
        assert tokens_of(segments) == tokens[: ends + 1], how
        text = "".join(one.text for one in segments)
        assert text == tokenizer.decode(tokens).partition(stop)[0]
        assert segments[-1].finish_reason == "stop"
        assert segments[-1].generation_tokens == ends + 1


@pytest.mark.parametrize("decoding", ["plain", "speculative"])
def test_a_conversation_goes_on_behind_a_stop_string(loaded, decoding):
    model, tokenizer = loaded
    free = ssmlx.ChatSession(*loaded, ssmlx.GenerateConfig(max_tokens=LENGTH))
    said = "".join(one.text for one in free.reply("w1 w2")).split()
    stop = " ".join(said[5:7])
    config = ssmlx.GenerateConfig(max_tokens=LENGTH, stop=[stop], decoding=decoding)
    session = ssmlx.ChatSession(*loaded, config)
    for text in ("w1 w2", "w5", "w6 w7"):
        found = tokens_of(session.reply(text))
        prompt = chat_tokens(tokenizer, session.messages[:-1])
        assert found == answer(model, tokenizer, prompt, max_tokens=LENGTH, stop=stop)[0]
        assert stop not in session.messages[-1]["content"]
    assert session.messages[1]["content"].split() == said[:5]
    assert session.totals.tokens < 3 * LENGTH and session.totals.reused_tokens > 0


@pytest.mark.parametrize("stop", ["", ["w1", ""], [3], [None]])
def test_an_empty_stop_string_is_refused(stop):
    assert mentions(found_in(refusal(ssmlx.GenerateConfig, stop=stop)), "--stop")
