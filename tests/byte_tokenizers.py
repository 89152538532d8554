"""Tokenizers of bytes, with the markers of a family; and texts that a grammar allows."""

from functools import cache

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from real import CHAT_TEMPLATE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssmlx.formats.channels import HARMONY
from ssmlx.formats.families import CALL_FORMS


def make_tokenizer(template="", tokens=()):
    """A tokenizer of bytes, with a chat template and further special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    own.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
    added = [AddedToken(one, special=True, normalized=False) for one in tokens]
    fast.add_tokens(added, special_tokens=True)
    fast.chat_template = "{# " + template + " #}{{ tools }}{{ messages }}"
    return TokenizerWrapper(fast, eos_token_ids=[fast.eos_token_id])


def marks_of(name):
    """All marks of a form that models have as tokens."""
    if name == "harmony":
        return [*HARMONY.begins, HARMONY.message, *HARMONY.ends]
    form = CALL_FORMS[name]
    marks = [*form.opens, *form.ends, '<|"|>' if name == "gemma4" else ""]
    marks += [NS] if name == "minimax_m3" else []
    return [
        one
        for one in marks
        if one == NS or (one[:1] in "<[" and " " not in one and one != "</function>")
    ]


@cache
def tokenizer_of(name, *, has_tokens=False):
    """A tokenizer whose template tells a form."""
    signs = [HARMONY.signs] if name == "harmony" else CALL_FORMS[name].signs
    sign = signs[0] if isinstance(signs[0], str) else " ".join(signs[0])
    return make_tokenizer(sign, marks_of(name) if has_tokens else ())


NS = "]<]minimax[>["  # before each tag of MiniMax M3


def drawn(tokenizer, grammar, seed, liked="", most=3000):
    """A text of noise that a grammar holds to its form; of likely characters that are liked."""
    from ssmlx.server.grammars import GrammarMask, compiled_matcher, llguidance_tokenizer

    noise = np.random.default_rng(seed)
    constrain = GrammarMask(compiled_matcher(llguidance_tokenizer(tokenizer), grammar))
    size = len(tokenizer.get_vocab())
    bonus = np.zeros(size, np.float32)
    for one in liked:
        bonus[tokenizer.encode(one, add_special_tokens=False)] = 8
    tokens: list[int] = []
    while len(tokens) < most:
        logits = mx.array(noise.normal(size=size).astype(np.float32) + bonus)[None]
        tokens.append(mx.argmax(constrain(tokens, logits)).item())
        if tokens[-1] in tokenizer.eos_token_ids:
            return tokenizer.decode(tokens[:-1])
    raise AssertionError(f"no end: {tokenizer.decode(tokens)[:500]}")


def write_byte_tokenizer(folder):
    """Tokens are bytes, so that any schema can be followed."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")
    tools = "{% if tools %}{# <tool_call> tool_call.name #}{{ tools | tojson }}{% endif %}"
    fast.chat_template = tools + CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast.eos_token_id


def byte_tokenizer(normalizer=None, added=(), **more):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE({letter: n for n, letter in enumerate([*letters, "abc"])}, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    own.decoder = decoders.ByteLevel()
    own.normalizer = normalizer
    own.add_special_tokens([AddedToken("</s>"), *added])
    fast = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", **more)
    fast.chat_template = CHAT_TEMPLATE
    return TokenizerWrapper(fast)
