"""Text completions of several prompts, several choices, and of prompts that are only scored."""

import asyncio
import json
import time
from itertools import accumulate

import pytest

pytest.importorskip("starlette")

import httpx2 as httpx
import mlx.core as mx
from asking import CHAT, COMPLETIONS, LAST, chat, client_of, reply
from forwards import watch_engine
from real import words, write_tiny_adapter
from tiny import cost_shared_calls

import ssmlx
from ssmlx.decoding.sampling import TokenLogprobs
from ssmlx.prompt_cache import PromptCache
from ssmlx.server.app import _json_in_pieces, make_app
from ssmlx.server.completions import TextCompletionWriter
from ssmlx.server.handler import Limits, RequestHandler
from ssmlx.server.logprobs import TokenEntries
from ssmlx.server.requests import AnswerRequest, ChoiceEnd, TextPart

PROMPTS = [words(9), words(5, 20), "w7", words(9)]
IDS = [[8, 9, 10], [11, 12], [13]]
SAMPLED = {"temperature": 1, "seed": 3, "top_p": 0.9}


@pytest.fixture
def client(serve):
    return client_of(serve())


def choices(client, **body):
    """Those of an answer, and its usage; of a stream as its chunks join to them."""
    chunks = reply(client, body, COMPLETIONS)
    if not body.get("stream"):
        return chunks[0]["choices"], chunks[0]["usage"]
    *chunks, last = chunks
    found = {}
    for (choice,) in (chunk["choices"] for chunk in chunks):
        whole = found.setdefault(choice["index"], {"text": "", "logprobs": None})
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, more in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(name, []).extend(more)
    return [{"index": n, **whole} for n, whole in sorted(found.items())], last["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [PROMPTS, IDS, [PROMPTS[0], IDS[0]]])
def test_several_prompts_are_answered_as_each_alone(client, prompts, stream):
    settings = {**SAMPLED, "n": 2}
    found, usage = choices(client, prompt=prompts, stream=stream, **settings)
    alone = [choices(client, prompt=one, **settings) for one in prompts]
    texts = [choice["text"] for own, _ in alone for choice in own]
    assert [choice["text"] for choice in found] == texts and len({*texts[:2]}) == 2
    assert [choice["index"] for choice in found] == [*range(2 * len(prompts))]
    assert {choice["finish_reason"] for choice in found} == {"length"}
    for name in ("prompt_tokens", "completion_tokens"):
        assert usage[name] == sum(own[name] for _, own in alone)


def test_choices_share_their_prompt_and_their_calls(serve, engine, monkeypatch):
    client = client_of(serve(ssmlx.GenerateConfig(max_tokens=8, decoding="plain")))
    alone = [choices(client, prompt=words(50), **{**SAMPLED, "seed": 3 + n})[0] for n in range(3)]
    forwards = watch_engine(monkeypatch, engine)
    cost_shared_calls(monkeypatch, lambda rows: 0.01)
    for prompts in ([words(50, 7)], [words(40, 3), words(45, 30)]):
        del forwards[:]
        _, usage = choices(client, prompt=prompts, n=3, **SAMPLED)
        assert sum(forwards.pieces) == usage["prompt_tokens"] - len(prompts), "each prompt once"
        assert forwards.num_shared > 0
    found, _ = choices(client, prompt=words(50), n=3, **SAMPLED)
    assert [one["text"] for one in found] == [one["text"] for (one,) in alone]


def reference(engine, name, tokens):
    """Log probabilities [R, V] of what follows each of the tokens."""
    model = engine.model("none" if name == "tiny" else name)
    cache = model.make_cache()
    logits = model.backbone.append(mx.array(tokens), cache).logits
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_prompt_is_scored_as_lm_eval_reads_it(engine, adapter, client, own, stream):
    """`local-completions` sends `echo`, `logprobs` and one token to write, which it drops."""
    prompts = [[8 + 7 * n % 50 for n in range(size)] for size in (150, 40, 2)]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    name = "tiny:own" if own else "tiny"
    found, usage = choices(client, model=name, stream=stream, seed=1234, **body)
    for tokens, choice in zip(prompts, found, strict=True):
        told = choice["logprobs"]
        assert {len(one) for one in told.values()} == {len(tokens) + 1}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        expected = reference(engine, str(adapter) if own else "tiny", tokens)
        for context in (1, len(tokens) - 1):
            places = range(context, len(tokens))
            wanted = sum(expected[n - 1, tokens[n]].item() for n in places)
            likeliest = [mx.argmax(expected[n - 1]).item() == tokens[n] for n in places]
            logprobs = told["token_logprobs"][context:-1]
            tops = [max(top.values()) for top in told["top_logprobs"][context:-1]]
            assert sum(logprobs) == pytest.approx(wanted, abs=1e-3)
            assert [*map(float.__eq__, logprobs, tops)] == likeliest
        assert told["text_offset"] == [0, *accumulate(map(len, told["tokens"][:-1]))]
        assert choice["text"] == "".join(told["tokens"])
        assert choice["text"].startswith(engine.tokenizer.decode(tokens))
    assert usage["completion_tokens"] == 3 and usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_nothing_is_written_where_no_token_is_asked_for(client, engine):
    body = {"prompt": ["w1 w2 w3", [8, 9]], "max_tokens": 0}
    found, usage = choices(client, **body, echo=True, logprobs=2)
    assert [one["text"] for one in found] == ["w1 w2 w3", "w1 w2"]
    assert [len(one["logprobs"]["tokens"]) for one in found] == [3, 2]
    assert all(2 <= len(top) <= 3 for top in found[0]["logprobs"]["top_logprobs"][1:])
    assert {one["finish_reason"] for one in found} == {"length"}
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == 5
    assert [one["text"] for one in choices(client, **body)[0]] == ["", ""]
    (echoed,), _ = choices(client, prompt="w1  w2", echo=True)
    (plain,), _ = choices(client, prompt="w1  w2")
    assert plain["text"].startswith(" ")
    assert echoed["text"] == "w1  w2" + plain["text"] and echoed["logprobs"] is None


def test_a_scored_prompt_of_one_token_has_nothing_to_score(client):
    (found,), _ = choices(client, prompt="w1", max_tokens=0, echo=True, logprobs=1)
    assert found["logprobs"]["token_logprobs"] == found["logprobs"]["top_logprobs"] == [None]


def test_an_end_token_is_told_as_others_tell_it(engine, base, tmp_path):
    """So that whoever drops the one token that had to be written drops none of the prompt."""
    end = next(engine.stream([8, 9], adapter="none", max_tokens=1)).tokens
    own = write_tiny_adapter(tmp_path / "own", base, scope="streams", end_token_ids=end)
    handler = RequestHandler(engine, {"tiny": str(own)}, prompt_caches=[PromptCache()])
    client = client_of(make_app(handler, ssmlx.GenerateConfig()))
    body = {"prompt": [8, 9], "max_tokens": 1, "logprobs": 0, "echo": True}
    (found,), _ = choices(client, **body)
    assert len(found["logprobs"]["tokens"]) == 3 and found["finish_reason"] == "stop"


def test_many_answers_leave_room_for_others(serve):
    """A request of 24 answers, with a single place: another one is let in between them."""
    order = []
    app = serve(limits=Limits(open=1))

    async def both():
        many = {"prompt": PROMPTS[:3], "n": 8, **SAMPLED}
        asked = [(COMPLETIONS, many), *[(CHAT, chat())] * 3]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def ask(number):
                await asyncio.sleep(0.02 * number)
                found = await http.post(asked[number][0], json=asked[number][1])
                order.append(number)
                return found.json()

            return await asyncio.gather(*map(ask, range(4)))

    many, *others = asyncio.run(both())
    assert order[-1] == 0 and len(many["choices"]) == 24
    assert len({one["choices"][0]["message"]["content"] for one in others}) == 1
    told = client_of(app).get("/metrics").text
    assert "ssmlx_open 0.0" in told and "ssmlx_waiting 0.0" in told


def test_an_echoed_prompt_is_followed_by_its_answer_without_a_comment_between(client):
    body = {"prompt": words(9), "echo": True, "stream": True, "max_tokens": 2}
    found = client.post("/v1/completions", json=body)
    assert found.status_code == 200 and found.text.count("data: ") > 2
    assert all(one.startswith("data: ") for one in found.text.split("\n\n") if one)


ENTRY = {"token": "w1 ", "logprob": -1.0, "bytes": None, "top_logprobs": []}


def written(parts, *, stream=False):
    """The chunks of a text completion, and the whole reply."""
    config = ssmlx.GenerateConfig()
    ask = AnswerRequest(question="", config=config, is_chat=False, stream=stream)
    writer = TextCompletionWriter(ask)

    async def told():
        for part in (*parts, ChoiceEnd("length", LAST)):
            yield part

    async def all_of_them():
        return [
            chunk["choices"][0] async for _, chunk in writer.events(told()) if chunk != "[DONE]"
        ]

    return asyncio.run(all_of_them()), writer.reply["choices"][0]


def test_log_probabilities_are_written_in_proportion_to_their_number():
    started = time.process_time()
    (_, chunk, _), _ = written(
        [TextPart("12345", 5), TextPart("w1 " * 30_000, 1, [ENTRY] * 30_000)]
    )
    assert time.process_time() - started < 2
    assert chunk["logprobs"]["text_offset"] == [*range(5, 90_005, 3)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_keeps_no_log_probabilities(stream):
    (chunk, _), whole = written([TextPart("w1 ", 1, [ENTRY])], stream=stream)
    assert chunk["logprobs"]["tokens"] == ["w1 "]
    assert whole["logprobs"] is None if stream else whole["logprobs"] == chunk["logprobs"]


def test_a_long_prompt_is_echoed_in_parts(client, monkeypatch):
    monkeypatch.setattr("ssmlx.server.choices._AT_ONCE", 16)
    body = {"prompt": [words(50), "w7"], "echo": True, "logprobs": 2, "max_tokens": 1, "n": 2}
    whole, _ = choices(client, **body)
    chunks = reply(client, {**body, "stream": True}, COMPLETIONS)
    told = [one["logprobs"] for chunk in chunks for one in chunk["choices"]]
    assert max(len(one["tokens"]) for one in told if one) == 16
    assert [one["text"] for one in choices(client, stream=True, **body)[0]] == [
        one["text"] for one in whole
    ]
    assert all(one["text"] == "".join(one["logprobs"]["tokens"]) for one in whole)
    for one in whole:
        sizes = [*map(len, one["logprobs"]["tokens"][:-1])]
        assert one["logprobs"]["text_offset"] == [0, *accumulate(sizes)]


def test_a_reply_in_pieces_is_its_json():
    value = {"a": {}, "b": [], "c": [{"d": {"e": [*range(250)], "f": "é\n"}, "g": None}] * 3}
    value["h"] = [[[[[["deep"]]]]], {"i": {"j": {"k": {"l": [1.5, True]}}}}, ()]
    pieces = [*_json_in_pieces(value)]
    assert "".join(pieces) == json.dumps(value) and max(map(len, pieces)) < 600


def test_a_token_is_decoded_once_for_all_its_entries(engine, monkeypatch):
    decoded = []
    entries = TokenEntries(engine.tokenizer)
    others = [TokenLogprobs(9, -1.0, ((9, -1.0), (10, -2.0)))] * 50
    first = entries.of_prompt(8, others)
    decode = engine.tokenizer._tokenizer.decode
    monkeypatch.setattr(
        engine.tokenizer._tokenizer,
        "decode",
        lambda tokens, **more: decoded.append(tokens) or decode(tokens, **more),
    )
    assert entries.of_prompt(8, others) == first and len(decoded) <= 1
