"""Tokens to text, piece by piece: the pieces join to what the tokenizer makes of all tokens."""

import random

import pytest
import sentencepiece
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    NewlineTokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from real import answer
from tiny import make_model
from tokenizers import Tokenizer, decoders, models
from transformers import GPTSw3Tokenizer, PreTrainedTokenizerFast

import ssmlx
from ssmlx.detokenizer import Detokenizer
from ssmlx.generation.answer_end import AnswerText

VOCAB = 64
UNKNOWN = range(VOCAB, VOCAB + 8)  # ids of a padded vocabulary
BYTES = [f"<0x{byte:02X}>" for byte in "日é🎉a".encode() + b"\xff\n"]
PIECES = ["▁", "▁▁▁▁", "▁a", "▁ret", "b", "ret", "x", "\n", "▁\n", ".", "▁.", "é", "日本", "<s>"]
LETTERS = [
    "Ġ", "ĠĠĠĠ", "Ġa", "Ġret", "b", "ret", "x", "Ċ", "ĠĊ", ".", "Ġ.", "æ", "Ĺ", "¥", "æĹ¥", "Ã",
    "©", "Ã©", "ð", "Ł", "İ", "ī", "ÿ", "ï¿½", "Ġæ", "<s>",
]  # fmt: skip
WORDS = ["a", "'", "n", "n't", "t", "'s", "s", "'m", "v", "'ve", "'re", ".", "?", "!", ",", "r"]
SPIECE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def fast(model, decoder=None, kind=PreTrainedTokenizerFast, **settings):
    made = Tokenizer(model)
    if decoder is not None:
        made.decoder = decoder
    return kind(tokenizer_object=made, **settings)


def numbered(words):
    """A vocabulary of `VOCAB` ids, the last ones of words that are no one's text."""
    return {word: n for n, word in enumerate([*words, *map("<{}>".format, range(VOCAB))][:VOCAB])}


def pieces(decoder, words=(*PIECES, *BYTES)):
    return fast(models.BPE(numbered(words), [], byte_fallback=True), decoder)


def byte_letters():
    return fast(models.BPE(numbered(LETTERS), []), decoders.ByteLevel())


def words(decoder=None, **settings):
    return fast(models.WordLevel(numbered(WORDS), unk_token="a"), decoder, **settings)


def word_parts():
    return models.WordPiece(numbered(["a", "##b", *WORDS[1:]]), unk_token="a")


def slow_sentencepiece(folder):
    """A tokenizer that no file of the tokenizers library stands for."""
    text = folder / "text.txt"
    text.write_text("a few words. some more words, and it's a\nline\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    return GPTSw3Tokenizer(str(folder / "spiece.model"))


SPM = SPMStreamingDetokenizer
NAIVE = NaiveStreamingDetokenizer
# How each is made, and what mlx-lm serves it with.
KINDS = {
    "bytes": (byte_letters, BPEStreamingDetokenizer),
    "naive": (byte_letters, NAIVE),
    "spm": (lambda: pieces(decoders.Sequence([*SPIECE, decoders.Strip(" ", 1, 0)])), SPM),
    "spm without strip": (lambda: pieces(decoders.Sequence([*SPIECE])), SPM),
    "metaspace": (lambda: pieces(decoders.Metaspace()), NAIVE),
    "metaspace, first": (lambda: pieces(decoders.Metaspace(prepend_scheme="first")), NAIVE),
    "metaspace, never": (lambda: pieces(decoders.Metaspace(prepend_scheme="never")), NAIVE),
    "suffixes": (lambda: pieces(decoders.BPEDecoder(), ("a</w>", "b", "c</w>", ".</w>")), NAIVE),
    "wordpiece": (
        lambda: fast(
            models.WordPiece(numbered(["a", "##b", *WORDS[1:]]), unk_token="a"),
            decoders.WordPiece(),
        ),
        NAIVE,
    ),
    "words": (words, NAIVE),
    "words, cleaned": (lambda: words(clean_up_tokenization_spaces=True), NAIVE),
    "wordpiece, cleaned": (
        lambda: words(decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True),
        NAIVE,
    ),
    "line ends": (
        lambda: fast(
            models.WordLevel(numbered(["<", "n", ">", "<n>", "a"]), unk_token="a"),
            decoders.Fuse(),
            NewlineTokenizer,
        ),
        NAIVE,
    ),
    "sentencepiece": (slow_sentencepiece, NAIVE),
}


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path):
    make, detokenizer = KINDS[request.param]
    return TokenizerWrapper(make(tmp_path) if make is slow_sentencepiece else make(), detokenizer)


def texts(tokenizer, seed, count):
    """Tokens at random, the words that matter more often, and some ids without a word."""
    rng = random.Random(seed)
    drawn = [*range(32)] * 3 + [*range(len(tokenizer))] + [*UNKNOWN]
    if not tokenizer.is_fast:  # its special tokens put a space before the words before them
        drawn = [token for token in drawn if token not in tokenizer.all_special_ids]
    for _ in range(count):
        yield [rng.choice(drawn) for _ in range(rng.randint(0, 24))]


def whole(tokenizer, tokens):
    """What the tokenizer makes of the tokens, those that it has no word for left out."""
    return tokenizer.decode([token for token in tokens if token < len(tokenizer)])


def test_the_pieces_of_a_text_join_to_the_whole(tokenizer):
    for tokens in texts(tokenizer, 1, 120):
        said = Detokenizer(tokenizer)
        text = ""
        for count, token in enumerate(tokens, 1):
            text += said.add(token)
            assert text + said.held_back_text() == whole(tokenizer, tokens[:count])
            assert said.held_back_text() == said.held_back_text()
        assert text + said.held_back_text() == whole(tokenizer, tokens)


def ends_in_byte(tokenizer, tokens):
    known = [token for token in tokens if token < len(tokenizer)]
    return bool(known) and tokenizer.convert_ids_to_tokens(known[-1:])[0].startswith("<0x")


def test_the_pieces_behind_a_prompt_go_on_from_its_text(tokenizer):
    for seed, prompt in enumerate(texts(tokenizer, 2, 100)):
        before = whole(tokenizer, prompt)
        if before != before.rstrip("\N{REPLACEMENT CHARACTER} 'nvr<") or ends_in_byte(
            tokenizer, prompt
        ):
            continue  # its end would be another one
        for tokens in texts(tokenizer, seed, 3):
            said = Detokenizer(tokenizer, prompt)
            text = "".join(map(said.add, tokens)) + said.held_back_text()
            assert before + text == whole(tokenizer, [*prompt, *tokens])


def test_the_text_of_steps_is_that_of_tokens(tokenizer):
    rng = random.Random(3)
    for tokens in texts(tokenizer, 4, 50):
        text = AnswerText(tokenizer, ["zzz"])
        joined = ""
        for start in range(0, len(tokens), size := rng.randint(1, 5)):
            for token in tokens[start : start + size]:
                assert not text.add(token)
            joined += text.take_segment(is_last=False)
            assert whole(tokenizer, tokens).startswith(joined)
        assert joined + text.take_segment(is_last=True) == whole(tokenizer, tokens)


@pytest.mark.parametrize("kind", ["metaspace", "spm", "bytes"])
def test_text_that_nothing_can_change_does_not_wait(kind, tmp_path):
    tokenizer = TokenizerWrapper(KINDS[kind][0](), NAIVE)
    vocabulary = tokenizer.get_vocab()
    line, space = ("Ċ", "Ġ") if kind == "bytes" else ("\n", "▁")
    tokens = [vocabulary[name] for name in ("x", line, 4 * space, "ret", f"{space}a")]
    said = Detokenizer(tokenizer)
    assert [said.add(token) for token in tokens] == ["x", "\n", "    ", "ret", " a"]
    assert said.held_back_text() == ""


def test_bytes_wait_for_their_character():
    letters = {"bytes": ["æ", "Ĺ", "¥", "Ġa"], "spm": ["<0xE6>", "<0x97>", "<0xA5>", "▁a"]}
    pieces = {"bytes": ["", "", "日", " a"], "spm": ["", "", "", "日 a"]}
    for kind, names in letters.items():
        tokenizer = TokenizerWrapper(KINDS[kind][0](), NAIVE)
        said = Detokenizer(tokenizer)
        assert [said.add(tokenizer.get_vocab()[name]) for name in names] == pieces[kind]


@pytest.mark.parametrize("kind", ["bytes", "spm", "metaspace", "words, cleaned"])
def test_an_answer_of_a_padded_vocabulary_is_the_decoded_one(kind):
    make, detokenizer = KINDS[kind]
    tokenizer = TokenizerWrapper(make(), detokenizer)
    model = make_model(vocab=VOCAB + len(UNKNOWN))
    unknown = 0
    for seed in range(2):
        for stop in ((), ("zzz",)):
            segments = [
                *ssmlx.stream_generate(
                    model, tokenizer, [1, 2], max_tokens=40, temp=2.0, seed=seed, stop=stop
                )
            ]
            tokens = [token for one in segments for token in one.tokens]
            assert "".join(one.text for one in segments) == tokenizer.decode(tokens)
            unknown += sum(token in UNKNOWN for token in tokens)
    assert unknown > 0
    tokens, last = answer(model, tokenizer, [1, 2], max_tokens=40)
    assert len(tokens) == last.generation_tokens
