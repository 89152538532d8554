"""Mutated models, templates, adapters, prompts and lines: refused in one line, or fine.

The same examples each time. Nothing takes 10 seconds, no process is started, nothing is connected
to, and no exception comes out but `InputError`.
"""

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from real import VOCAB, write_base, write_tiny_adapter
from tiny_lora import write_lora, write_pefts

import ssmlx
from ssmlx import templates
from ssmlx.errors import InputError
from ssmlx.loading.adapter import STREAMS_FILE, load_adapter
from ssmlx.loading.folders import LORA_SETTINGS
from ssmlx.loading.lora_files import LORA_FILE
from ssmlx.prompts import chat_tokens, encode_prompt, read_prompts
from ssmlx.training.data import Encoder, read_examples

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MOST_SECONDS = 10
LORAS = ("lora", "pefts")
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")
_watched = [False]
_seen = []


def _hook(event, arguments):
    if _watched[0] and event in _FORBIDDEN:
        _seen.append(event)


sys.addaudithook(_hook)


@contextlib.contextmanager
def trial():
    """What is tried inside ends well, or is refused; in time, and without doing anything else."""
    _watched[0] = True
    started = time.monotonic()
    try:
        yield
    except InputError as error:
        assert len(str(error).splitlines()) == 1, str(error)
    finally:
        _watched[0] = False
    assert not _seen
    assert time.monotonic() - started < MOST_SECONDS


def tiers(**strategies):
    """A test on some hundreds of examples in the second tier, on thousands in the third."""

    def both(test):
        def of(count, mark):
            run = settings(
                max_examples=count,
                derandomize=True,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            )(given(**strategies)(test))
            return pytest.param(run, marks=mark)

        @pytest.mark.parametrize("run", [of(300, pytest.mark.slow), of(2000, pytest.mark.long)])
        def fuzzed(run, places):
            run(places)

        return fuzzed

    return both


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model, its adapter, and a folder to spoil copies in; the model's own tokenizer."""
    root = tmp_path_factory.mktemp("fuzz")
    base = write_base(root / "base")
    adapter = write_tiny_adapter(root / "adapter", base)
    model, tokenizer = ssmlx.load(str(base))
    lora = write_lora(root / "lora", base, keys=["self_attn.q_proj", "lm_head"])
    pefts = {
        "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"lm_head": 3}, "use_rslora": True,
        "layers_to_transform": None, "bias": "none", "modules_to_save": None, "use_dora": False,
    }  # fmt: skip
    write_pefts(root / "pefts", mx.load(str(lora / LORA_FILE)), **pefts)
    return {
        **{kind: root / kind for kind in LORAS},
        "base": base,
        "adapter": adapter,
        "work": root / "work",
        "model": model,
        "tokenizer": tokenizer,
    }


def answer(model, tokenizer):
    for response in ssmlx.stream_generate(model, tokenizer, "w1 w2", max_tokens=3):
        assert all(0 <= token < VOCAB for token in response.tokens)


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([10**9, 10**12, 10**400, -(2**31), 2**31, 2**63, 1e308, 1e-308, 0.5]),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "llama", "../../etc", "float16", "w1", "{prompt}", "\ud800", "\x00"]),
    st.just("a" * 9999),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(TEXTS, one, max_size=3),
    max_leaves=5,
)
EDITS = st.lists(st.tuples(st.integers(0, 999), VALUES | st.just("<drop>")), min_size=1, max_size=3)
FLIPS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=8)


def paths(value, path=()):
    """Every place in a JSON value."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from paths(one, (*path, key))


def edited(value, edits):
    """A JSON value with others in its places, or without them."""
    root = {"": json.loads(json.dumps(value))}
    for number, new in edits:
        known = list(paths(root))[1:]
        *above, last = known[number % len(known)]
        place = root
        for key in above:
            place = place[key]
        if new == "<drop>" and above:
            del place[last]
        else:
            place[last] = new
    return root[""]


def flipped(data, flips, most=None):
    """Bytes, some of which are others; of the first `most`."""
    spoilt = bytearray(data)
    for place, byte in flips:
        spoilt[place % min(len(spoilt), most or len(spoilt))] = byte
    return bytes(spoilt)


def written(source, target, name, edits, flips):
    """A copy of a folder with a spoilt file."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    file = target / name
    text = json.dumps(edited(json.loads(file.read_text()), edits)).encode()
    file.write_bytes(flipped(text, flips) if flips else text)
    return target


MAYBE_FLIPS = st.just([]) | st.just([]) | st.just([]) | FLIPS


@tiers(edits=EDITS, flips=MAYBE_FLIPS)
def test_config(places, edits, flips):
    folder = written(places["base"], places["work"], "config.json", edits, flips)
    with trial():
        answer(*ssmlx.load(str(folder)))


FILES = ("tokenizer_config.json", "tokenizer.json")


@tiers(edits=EDITS, flips=MAYBE_FLIPS, file=st.sampled_from(FILES))
def test_tokenizer(places, edits, flips, file):
    folder = written(places["base"], places["work"], file, edits, flips)
    with trial():
        model, tokenizer = ssmlx.load(str(folder))
        tokens = encode_prompt({"prompt": "w1 w2"}, model, tokenizer)
        list(ssmlx.stream_generate(model, tokenizer, tokens, max_tokens=1))


@tiers(
    edits=EDITS,
    flips=MAYBE_FLIPS,
    weights=st.none() | FLIPS,
    file=st.sampled_from([STREAMS_FILE, LORA_FILE]),
    most=st.sampled_from([None, 40, 400]),
)
def test_adapter(places, edits, flips, weights, file, most):
    if weights is None:
        folder = written(places["adapter"], places["work"], "streams_config.json", edits, flips)
    else:
        shutil.rmtree(places["work"], ignore_errors=True)
        folder = Path(shutil.copytree(places["adapter"], places["work"]))
        (folder / file).write_bytes(flipped((folder / file).read_bytes(), weights, most))
    with trial():
        load_adapter(folder)
        answer(ssmlx.swap_adapter(places["model"], folder), places["tokenizer"])


@tiers(edits=EDITS, flips=MAYBE_FLIPS, weights=st.none() | FLIPS, kind=st.sampled_from(LORAS))
def test_lora(places, edits, flips, weights, kind):
    folder = written(places[kind], places["work"], LORA_SETTINGS, edits, flips)
    if weights is not None:
        folder = Path(shutil.copytree(places[kind], folder, dirs_exist_ok=True))
        file = next(folder.glob("*.safetensors"))
        file.write_bytes(flipped(file.read_bytes(), weights, 400))
    with trial():
        load_adapter(folder)
        answer(ssmlx.swap_adapter(places["model"], folder), places["tokenizer"])


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{% if m.role == 'user' %}", "{% else %}",
    "{% endif %}", "{{ m.content }}", "{{ m['role'] ~ m.content }}",
    "{% set n = namespace(x='a') %}",
    "{{ n.x }}", "{% for i in range(99999) %}", "{{ n.x * 99999 }}",
    "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "{{ messages|tojson(indent=9999999) }}",
    "{% include 'a' %}", "{% import 'a' as a %}", "{% extends 'a' %}", "{% block b %}",
    "{% endblock %}", "{{ self.b() }}", "{{ ''.__class__ }}", "{{ n.x.center(99999999) }}",
    "{{ raise_exception('no') }}", "{{ [n.x]*999 }}",
    "{{ n.x|replace('a', n.x * 9999) }}", "{{ '%99999999d' % 1 }}", "{{ cycler(1).next() }}",
    "{% generation %}", "{% endgeneration %}", "{% call f(1) %}", "{% endcall %}", "{{ loop }}",
    "{% set x %}", "{% endset %}", "{% filter upper %}", "{% endfilter %}", "{{", "}}", "{%", "%}",
    "{#", "w1 ", "{{ dict(a=n) }}", "{{ strftime_now('%Y') }}", "{{ x|sort|list }}", "\n", "-",
    "{% with a=1 %}", "{% endwith %}", "{% continue %}", "{{ lipsum(999) }}", "{{ joiner()() }}",
]  # fmt: skip


@tiers(
    pieces=st.lists(st.sampled_from(PIECES), max_size=25),
    kind=st.sampled_from(["text"] * 9 + ["other"]),
    other=VALUES,
)
def test_template(places, pieces, kind, other):
    tokenizer = places["tokenizer"]
    before = tokenizer._tokenizer.chat_template
    with pytest.MonkeyPatch.context() as patch, trial():
        patch.setattr(templates, "MAX_SECONDS", 0.5)
        tokenizer._tokenizer.chat_template = "".join(pieces) if kind == "text" else other
        try:
            chat_tokens(tokenizer, [{"role": "user", "content": "w1"}] * 3)
        finally:
            tokenizer._tokenizer.chat_template = before


TURN = {"role": "user", "content": "w1"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LINES = [
    {"prompt": "w1 w2"}, {"messages": [TURN, {"role": "assistant", "content": "w2"}]},
    {"messages": [TURN, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, TURN]},
    {"prompt": "w1", "completion": "w2"}, {"text": "w1 w2 w3"},
    {"prompt_tokens": [1, 2], "completion_tokens": [3]},
    {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]},
                  {"role": "tool", "content": "w3"}], "tools": TOOLS},
]  # fmt: skip


@tiers(line=st.sampled_from(LINES), edits=EDITS, flips=MAYBE_FLIPS, raw=st.none() | st.binary())
def test_lines(places, line, edits, flips, raw):
    file = places["work"].with_suffix(".jsonl")
    tokenizer = places["tokenizer"]
    text = json.dumps(edited(line, edits)).encode()
    file.write_bytes(raw if raw else flipped(text, flips) if flips else text)
    with trial():
        for prompt in read_prompts(file):
            tokens = encode_prompt(prompt, places["model"], tokenizer)
            list(ssmlx.stream_generate(places["model"], tokenizer, tokens, max_tokens=1))
    with trial():
        read_examples(file, Encoder(tokenizer, None, 2, 64))


NAMES = ("max_tokens", "temp", "top_p", "min_p", "top_k", "seed", "repetition_penalty",
         "repetition_context_size", "presence_penalty", "frequency_penalty",
         "prefill_step_size", "decoding", "drafter", "num_streams")  # fmt: skip


@tiers(
    text=TEXTS | st.text(),
    given_settings=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
def test_prompt(places, text, given_settings):
    more = {"max_tokens": 2, **given_settings}
    with trial():
        responses = ssmlx.stream_generate(
            places["model"], places["tokenizer"], text, **{"max_tokens": 2, **more}
        )
        for _ in zip(range(3), responses, strict=False):
            mx.clear_cache()
