"""Clients against a server in a process of its own, which says what `ssmlx.generate` does: those
that others wrote, and those that leave, stall, lie, or come all at once."""

import copy
import json
import random
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, takewhile

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

import httpx2 as httpx
import mlx.core as mx
from real import CHAT_TEMPLATE, ROOT, answer, write_base, write_tiny_adapter
from served import serving
from tiny import slow

import ssmlx

CHAT = "/v1/chat/completions"
LENGTH = 12
PROMPTS = [f"w{n} w{2 * n} w{n + 9}" for n in range(20)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    base = write_base(folder / "tiny", context=16384)
    tools = "{% if tools %}{{ ' ' }}{# <tool_call> tool_call.name #}{% endif %}"
    (base / "chat_template.jinja").write_text(tools + CHAT_TEMPLATE)
    write_tiny_adapter(folder / "own", base)
    return folder


def serve(tiny, *more):
    return serving(tiny, "--model", tiny / "tiny", "--adapter", tiny / "own", *more)


@pytest.fixture(scope="module")
def served(tiny):
    with serve(tiny, "--max-waiting", 20) as served:
        yield served


@pytest.fixture(scope="module")
def wanted(tiny):
    own = chats(tiny / "tiny", tiny / "own", "tiny:own", PROMPTS)
    return own + chats(tiny / "tiny", "none", "tiny", PROMPTS)


def chats(base, adapter, name, prompts, length=LENGTH):
    """Chats that may be asked for, and what is said."""
    model, tokenizer = ssmlx.load(str(base), adapter=adapter, dtype="float32")
    tokens = [ssmlx.prompt_tokens(one, model, tokenizer) for one in prompts]
    texts = [ssmlx.generate(model, tokenizer, one, max_tokens=length) for one in tokens]
    return [(asking(one, name, length), text) for one, text in zip(prompts, texts, strict=True)]


def asking(prompt="w1", model="tiny:own", max_tokens=LENGTH, **more):
    turns = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": turns, "max_tokens": max_tokens, **more}


def asked(served, body):
    """What is said; or after how many seconds to ask again."""
    reply = httpx.post(served.url + CHAT, json=body, timeout=120)
    if reply.status_code == 503:
        return float(reply.headers["retry-after"])
    return reply.json()["choices"][0]["message"]["content"]


def is_well(served, wanted):
    """Nothing is left open, and the next answers are right."""
    right = all(asked(served, body) == text for body, text in wanted[::8])
    return right and served.is_idle() and served.process.poll() is None


def measure_memory(served):
    command = ["ps", "-o", "rss=", "-p", str(served.process.pid)]
    return int(subprocess.check_output(command)) / 1024


def openai_of(served, key="none"):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def test_openai_python(served, wanted):
    client, (asked, text) = openai_of(served), wanted[3]
    # The client takes an answer that is cut for a failure.
    start, _, last = text.rpartition(" ")
    with client.chat.completions.stream(**asked, stop=f" {last}") as events:
        assert events.get_final_completion().choices[0].message.content == start
    prompt = f"user: {PROMPTS[3]} | model:"
    reply = client.completions.create(model="tiny:own", max_tokens=LENGTH, prompt=prompt)
    assert reply.choices[0].text == f" {text}"  # behind the prompt's text
    own = {"model": "tiny:own", "max_output_tokens": LENGTH, "input": PROMPTS[3]}
    assert client.responses.create(**own).output_text == text
    with client.responses.stream(**own) as events:
        *_, last = events
    assert last.type == "response.incomplete" and last.response.output_text == text


def test_anthropic_python(served, wanted):
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked, text = wanted[3]
    assert client.messages.create(**asked).content[0].text == text
    with client.messages.stream(**asked) as events:
        assert "".join(events.text_stream) == text
        used = events.get_final_message().usage
    counted = client.messages.count_tokens(model="tiny:own", messages=asked["messages"])
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def told(create, body, stream, most=None):
    """The text of an answer, or of its first chunks, after which the client leaves."""
    reply = create(**body, stream=stream)
    if not stream:
        return reply.choices[0].message.content
    with reply as chunks:
        return "".join(one.choices[0].delta.content or "" for one in islice(chunks, most))


# A key, prompts, streamed, at once. The cache of a key is cold when it is first seen. All prompts
# go two ways that differ in everything, a few go the others.
WAYS = [
    ("a", 50, False, 1), ("b", 50, True, 8), ("a", 8, True, 8), ("b", 8, False, 1),
    ("c", 8, True, 1), ("c", 8, True, 1), ("d", 8, False, 8), ("d", 8, False, 8),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("decoding", ["speculative", "plain"])
@pytest.mark.parametrize("task", ["sql_test_100", "e2e_test_100", "chat_test"])
def test_the_real_model_says_the_same_tokens(tmp_path, task, decoding, length=12):
    name = task.partition("_")[0]
    lines = (ROOT / "examples" / "data" / f"{task}.jsonl").read_text().splitlines()
    asked = [text for text in (json.loads(line).get("prompt") for line in lines) if text][:50]
    model, tokenizer = ssmlx.load("smollm2-135m", adapter=name, dtype="float32")
    prompts = [ssmlx.prompt_tokens(one, model, tokenizer) for one in asked]
    wanted = [answer(model, tokenizer, one, max_tokens=length)[0] for one in prompts]
    (keys := tmp_path / "keys").write_text("a b c d")
    keys.chmod(0o600)
    options = ("--adapter", name, "--decoding", decoding, "--api-keys", keys)
    parted = []

    def heard(key, number, stream):
        create = openai_of(served, key).chat.completions.create
        body = asking(asked[number], f"smollm2-135m:{name}", length)
        return [int(one) for one in told(create, body, stream).split()]

    with serving(tmp_path, *options, answers="ids") as served:
        for key, count, stream, width in WAYS:
            with ThreadPoolExecutor(width) as pool:
                found = list(pool.map(heard, cycle(key), range(count), cycle([stream])))
            for number in (n for n in range(count) if found[n] != wanted[n]):
                place = sum(takewhile(bool, map(int.__eq__, found[number], wanted[number])))
                tokens = mx.array([prompts[number] + wanted[number][:place]])
                logits = model.backbone.model(tokens)[0, -1]
                gap = abs(logits[wanted[number][place]] - logits[found[number][place]]).item()
                parted.append((key, width, number, place, gap))
    print(f"{task} {decoding}: parted at ties {parted}")
    assert all(width == 8 and gap < 1e-3 for _, width, *_, gap in parted), parted


def sent(served, body, times=1):
    one = socket.create_connection(("127.0.0.1", served.port))
    data = json.dumps(body)
    heads = "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}"
    one.sendall("\r\n".join((f"POST {CHAT} HTTP/1.1", *heads, "", data)).encode() * times)
    return one


@pytest.mark.slow
def test_who_does_not_read_delays_nobody(served, wanted):
    before = measure_memory(served)
    body = asking(stream=True, max_tokens=8000, top_logprobs=20)
    idle = [sent(served, {**body, "logprobs": True}) for _ in range(4)]
    time.sleep(3)
    found = asked(served, wanted[0][0]), sum(served.gauges())
    grown = measure_memory(served) - before
    [one.close() for one in idle]
    assert found == (wanted[0][1], 4) and grown < 64 and is_well(served, wanted)


@pytest.mark.slow
def test_200_at_once(served, wanted):
    with ThreadPoolExecutor(200) as pool:
        found = [*pool.map(lambda one: (asked(served, one[0]), one[1]), wanted * 5)]
    assert all(reply in (text, 1.0) for reply, text in found) and is_well(served, wanted)


@pytest.mark.slow
def test_who_leaves_in_the_prompt_or_in_decoding(served, wanted):
    long = asking(max_tokens=8000)
    for body in (asking(" ".join(PROMPTS * 150)), long, {**long, "stream": True}):
        for times in (1, 3):
            with sent(served, body, times):
                time.sleep(0.3)
            assert is_well(served, wanted), body


@pytest.mark.parametrize("kind", [signal.SIGTERM, *slow(signal.SIGINT)])
def test_a_signal_ends_it_in_seconds(tiny, kind):
    plain = ("--model", tiny / "tiny", "--decoding", "plain")  # whose calls are not timed at first
    with serving(tiny, *plain, "--max-open", 4) as served:
        body = asking(model="tiny", max_tokens=8000)
        clients = [sent(served, {**body, "stream": n % 2 == 0}) for n in range(8)]
        assert clients[0].recv(1000)
        served.process.send_signal(kind)
        # 0 where the shell that began the tests had this signal ignored.
        assert served.process.wait(10) in (0, 130, -kind)


@pytest.mark.long
def test_killed_while_it_writes_prompts_to_disk(tiny, wanted, tmp_path):
    for seconds in (0.0, 0.02, 0.1, 20.0, 0.0):
        with serve(tiny, "--prompt-cache", tmp_path) as served:
            assert all(asked(served, body) == text for body, text in wanted[::3])
            served.process.terminate()
            time.sleep(seconds)
    assert any(tmp_path.rglob("*.safetensors"))


# What each route is sent, before something is done to it.
TURNS = [{"role": "user", "content": "w1"}]
CALL = {"name": "f", "arguments": '{"a": 1}'}
USE = [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]
RESULT = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "w1"}]}]
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "w1"}
SETTINGS = {"model": "tiny", "stream": True, "temperature": 0.5, "max_tokens": 4}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODIES = {
    CHAT: {
        **SETTINGS, "tools": [{"type": "function", "function": TOOL}], "logprobs": True, "n": 1,
        "messages": [*TURNS, {"role": "assistant", "tool_calls": [{"id": "c", "function": CALL}]},
                     {"role": "tool", "tool_call_id": "c", "content": "w3"}], "stop": ["w9"],
        "logit_bias": {"8": 1}, "prediction": {"content": "w1"}, "response_format": {},
    },
    "/v1/completions": {**SETTINGS, "prompt": [8, 9], "logprobs": 1, "n": 2, "suffix": None},
    "/v1/messages": {
        **SETTINGS, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "top_k": 3,
        "messages": [*TURNS, {"role": "assistant", "content": USE},
                     {"role": "user", "content": RESULT}], "stop_sequences": ["w9"],
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": TURNS, "system": "w1"},
    "/v1/responses": {**SETTINGS, "tools": [TOOL], "max_output_tokens": 4, "input": [
        *TURNS, {"type": "function_call", "call_id": "c", **CALL}, OUTPUT]},
}  # fmt: skip
CHUNKED = b"Transfer-Encoding: chunked"
VALUES = [
    None, True, 0, -1, 2**64, 10**400, 0.5, 1e308, 1e-320, float("nan"), float("inf"), "", "w1",
    "\ud800", "\0", "{{ 7*7 }}", "x" * 5000, "../../etc", "auto", "</s>", [], {}, [None], [{}],
    {"": None}, {"role": "user"}, ["\ud800"], json.loads('{"a":[' * 99 + "]}" * 99), [8], [10**30],
    ["w1"] * 300, {"type": "json_object"}, {"type": "text", "text": "w1"},
]  # fmt: skip
LINES = [
    b"GET / HTTP/1.1", b"POST * HTTP/1.1", b"\xff / HTTP/1.1", b"GET http://e/ HTTP/9", b"bad",
    b"Host: evil", b"Host: [", b"Content-Type: text/plain", b"Origin: http://[", b"Upgrade: x",
    b"Cookie: " + b"a=b;" * 20_000, b"Expect: 100-continue", b"Content-Length: -1", b": \xff", b"",
]  # fmt: skip


def places(value):
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        yield from places(inner) if isinstance(inner, dict | list) else ()


def changed(rng, body):
    body = copy.deepcopy(body)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        holder, key = rng.choice([*places(body)])
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    place = rng.randrange(len(data))
    bad = (data[:place], data[:place] + b"\xff" + data[place:], data * 2, b"[" * 10**5, b"", b"1",
           b'{"n": %s}' % (b"9" * 5000), b'{"messages": "%s"}' % (b"w1 " * 300_000))  # fmt: skip
    return data if rng.random() < 0.7 else rng.choice(bad)


def framed(rng, path, data):
    """The bytes of a request or more, and whether it is one of HTTP."""
    heads = b"Host: localhost", b"Content-Type: application/json", b"Connection: close"
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Content-Length: %d" % len(data), *heads]
    kind = rng.randrange(16)
    if kind < 3:
        lines[rng.randrange(5)] = rng.choice(LINES)
    elif kind == 3:
        lines[1] = b"Content-Length: %d" % max(0, len(data) + rng.randrange(-99, 99))
    elif kind < 6:
        lines[1] = CHUNKED
        whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        data = rng.choice((whole, whole[:-3], b"zz\r\n" + whole, b"f" * 16 + b"\r\n" + whole))
    elif kind == 6:  # uvicorn tells the first of several not that its client left: short answers
        data = json.dumps(BODIES[path]).encode()
        lines[1:] = b"Content-Length: %d" % len(data), *heads[:2]
    found = b"\r\n".join((*lines, b"", data))
    return found * 3 if kind == 6 else rng.randbytes(300) if kind == 7 else found, kind > 7


def hostile(served, seed):
    rng = random.Random(seed)
    got = b""
    path, body = rng.choice([*BODIES.items()])
    data, is_http = framed(rng, path, changed(rng, body))
    with socket.create_connection(("127.0.0.1", served.port)) as one:
        one.settimeout(60 if is_http else 0.2)
        try:
            one.sendall(data)
            while rng.random() < 0.95 and (piece := one.recv(2**16)):
                got += piece
        except OSError as error:
            got += b"server's log" if is_http and isinstance(error, TimeoutError) else b""
    is_wrong = b"HTTP/1.1 500" in got or b"server's log" in got
    return f"{seed}: {data[:2000]!r}: {got[-2000:]!r}" if is_wrong else None


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
def test_hostile_requests(served, wanted, count):
    replies = {path: httpx.post(served.url + path, json=body) for path, body in BODIES.items()}
    assert {one.status_code for one in replies.values()} == {200}, replies
    for first in range(0, count, 200):
        with ThreadPoolExecutor(6) as pool:
            found = [*pool.map(lambda seed: hostile(served, seed), range(first, first + 200))]
        assert not any(found), "\n".join(filter(None, found))
        assert is_well(served, wanted), first


@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=pytest.mark.long)])
def test_clients_that_leave_at_random(served, wanted, count):
    """Finished answers are right, and nothing of the others stays."""
    client = openai_of(served)

    def ask(number):
        rng = random.Random(number)
        (body, text), stream = rng.choice(wanted), rng.random() < 0.7
        most = rng.randrange(LENGTH) if stream and rng.random() < 0.4 else None
        patience = rng.choice([0.05, *[120] * 9])
        create = client.with_options(timeout=patience).chat.completions.create
        try:
            found = told(create, body, stream, most)
        except openai.APITimeoutError:
            return patience < 1
        return found == text if most is None else text.startswith(found)

    sizes = []
    with ThreadPoolExecutor(8) as pool:
        for part in range(4):
            assert all(pool.map(ask, range(part * count // 4, (part + 1) * count // 4)))
            sizes.append(measure_memory(served))
    assert is_well(served, wanted)
    assert count < 1000 or sizes[-1] - sizes[0] < 24, sizes
