"""What a client sees while others ask for too much: of bytes, of forms, of connections.

Real servers on this machine; large attacks are `long`.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

import httpx2 as httpx
import mlx.core as mx
from asking import CHAT, COMPLETIONS, ask_all, chat, client_of, drive
from byte_tokenizers import byte_tokenizer, write_byte_tokenizer
from llguidance import LLMatcher, LLParserLimits
from real import CHAT_TEMPLATE, ROOT, words, write_base
from served import GET, is_well, serving
from tokenizers import AddedToken, normalizers

import ssmlx
from ssmlx.drafters.lookup import PromptLookupDrafter
from ssmlx.errors import ContextLengthError
from ssmlx.server import grammars
from ssmlx.server.app import make_app
from ssmlx.server.concurrency import READING, SMALL, AnswerSlots, BodyBytes
from ssmlx.server.handler import Limits, RequestHandler
from ssmlx.server.request_prompts import PromptReader
from ssmlx.server.text_lengths import most_bytes_per_token, with_length_check
from ssmlx.settings import PromptLookupConfig

COUNT = "/v1/messages/count_tokens"
SECONDS = 30
"""What a token may take on a machine that is busy with tests, while others ask for too much."""


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory):
    """A model whose tokens are bytes, with a context of 512."""
    base = write_base(tmp_path_factory.mktemp("load") / "tiny", context=512, vocab=264)
    write_byte_tokenizer(base)
    return base


@pytest.fixture(scope="module")
def byte_engine(bytes_model):
    with ssmlx.Engine(str(bytes_model), dtype="float32") as engine:
        yield engine


@pytest.fixture
def byte_client(byte_engine):
    return client_of(make_app(RequestHandler(byte_engine, {"tiny": None})))


# --- texts that are certainly too long ---


def test_a_token_stands_for_so_many_bytes_at_most():
    assert most_bytes_per_token(byte_tokenizer()) == 4, "of the token </s>"
    assert most_bytes_per_token(byte_tokenizer(normalizers.NFC())) == 12
    longer = byte_tokenizer(added=[AddedToken("<|longest|>", special=True)])
    assert most_bytes_per_token(longer) == 11


@pytest.mark.parametrize("tokenizer", [
    byte_tokenizer(normalizers.Strip()),
    byte_tokenizer(normalizers.Replace("aa", "a")),
    byte_tokenizer(added=[AddedToken("<end>", rstrip=True)]),
    byte_tokenizer(added=[AddedToken("<end>", lstrip=True)]),
])  # fmt: skip
def test_where_text_may_be_left_out_nothing_is_refused_by_its_bytes(tokenizer):
    assert most_bytes_per_token(tokenizer) is None
    assert with_length_check(tokenizer, None, 9) is tokenizer


def test_words_have_no_length(loaded):
    assert most_bytes_per_token(loaded[1]) is None, "an unknown word is one token"


def test_what_is_refused_by_its_bytes_is_too_long():
    tokenizer = byte_tokenizer(normalizers.NFC())
    most = most_bytes_per_token(tokenizer)
    checked = with_length_check(tokenizer, most, 10)
    for text in ("a" * 200, "K" * 60, "</s>" * 60, "가" * 60, "e\u0301" * 60):
        try:
            assert checked.encode(text) == tokenizer.encode(text)
        except ContextLengthError as error:
            assert error.limit == 10 and error.num_tokens <= len(tokenizer.encode(text))
    with pytest.raises(ContextLengthError):
        checked.encode("a" * 200)
    turns = [{"role": "user", "content": "Hi"}]
    assert with_length_check(tokenizer, most, 99).apply_chat_template(
        turns
    ) == tokenizer.apply_chat_template(turns)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, COUNT, "/v1/responses"])
def test_a_prompt_of_too_many_bytes_is_too_long(byte_client, path):
    text = "w" * 10_000
    body = {"messages": chat(text)["messages"], "prompt": text, "input": text}
    used = {CHAT: "messages", COMPLETIONS: "prompt", COUNT: "messages", "/v1/responses": "input"}
    found = byte_client.post(path, json={used[path]: body[used[path]]})
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (400, "context_length_exceeded")
    assert re.search(r"\b2\d*", error["message"]), "four bytes a token at most"


# --- what requests hold ---


def test_small_bodies_need_no_room_and_others_share_it():
    bodies = BodyBytes(3 * SMALL)
    with bodies.part() as first, bodies.part() as second:
        assert first.grow_to(2 * SMALL) and not second.grow_to(2 * SMALL)
        assert second.grow_to(SMALL) and first.grow_to(3 * SMALL)
        assert not first.grow_to(4 * SMALL)
    with bodies.part() as third:
        assert third.grow_to(3 * SMALL)


def test_bodies_of_all_requests_are_bounded(serve):
    app = serve(ssmlx.GenerateConfig(max_tokens=100), limits=Limits(bodies=2 * SMALL))
    large = chat("w1", padding="x" * (SMALL + 9_000))
    found = ask_all(app, [large, large, large, chat()])
    assert sorted(one.status_code for one in found) == [200, 200, 503, 503]
    assert found[-1].status_code == 200
    refused = [one for one in found if one.status_code == 503]
    assert all("retry-after" in one.headers for one in refused)
    assert ask_all(app, [large])[0].status_code == 200, "the room is given back"


def test_logprobs_of_prompts_are_bounded(serve, monkeypatch):
    monkeypatch.setattr("ssmlx.server.request_prompts.MOST_LOGPROBS", 1000)
    client = client_of(serve())
    asked = {"prompt": [words(50)] * 4, "echo": True, "logprobs": 3, "max_tokens": 0}
    assert client.post(COMPLETIONS, json=asked).status_code == 200
    found = client.post(COMPLETIONS, json={**asked, "logprobs": 9})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "logprobs")


def test_logprobs_of_answers_are_bounded_unless_they_are_streamed(serve, monkeypatch):
    monkeypatch.setattr("ssmlx.server.request_prompts.MOST_LOGPROBS", 96)
    client = client_of(serve(ssmlx.GenerateConfig(max_tokens=40)))
    asked = chat(logprobs=True, top_logprobs=3, n=2, ignore_eos=True)
    found = client.post(CHAT, json=asked).json()
    assert [one["finish_reason"] for one in found["choices"]] == ["length"] * 2
    assert found["usage"]["completion_tokens"] == 2 * 96 // (2 * (1 + 3))
    assert (
        client.post(CHAT, json={**asked, "max_tokens": 9}).json()["usage"]["completion_tokens"]
        == 2 * 9
    )
    streamed = client.post(CHAT, json={**asked, "stream": True}).text
    assert streamed.count('"top_logprobs"') == 2 * 40


def test_a_prediction_is_read_as_far_as_the_answer_may_reach(serve, engine, monkeypatch):
    """And not at all to count a prompt."""
    encoded = []
    encode = engine.tokenizer._tokenizer.encode
    monkeypatch.setattr(
        engine.tokenizer._tokenizer,
        "encode",
        lambda text, **more: encoded.append(text) or encode(text, **more),
    )
    client = client_of(serve())
    prediction = {"type": "content", "content": "w9 " * 100_000}
    found = client.post(CHAT, json=chat(prediction=prediction, max_tokens=4)).json()
    assert found["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] <= 4
    client.post(COUNT, json=chat(prediction=prediction))
    assert any("w9 w9" in text for text in encoded) and max(map(len, encoded)) < 100


def test_the_index_of_a_prediction_counts_as_memory():
    drafter = PromptLookupDrafter(PromptLookupConfig(reference=[*range(5000)]))
    before = drafter.cache_bytes
    drafter.start([1, 2, 3])
    assert before >= drafter.source.index.nbytes > 5000
    assert drafter.cache_bytes == before


def test_stop_texts_are_bounded(serve):
    found = client_of(serve()).post(CHAT, json=chat(stop=["x"] * 100_000))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "stop")


def test_counts_of_tokens_wait_in_the_queue(serve, monkeypatch):
    def slowly(reader, ask):
        time.sleep(0.3)
        return 7

    monkeypatch.setattr(PromptReader, "count_prompt_tokens", slowly)
    found = ask_all(serve(limits=Limits(open=1, waiting=2)), [chat()] * 8, COUNT)
    assert sorted(one.status_code for one in found) == [200] * 3 + [503] * 5


@pytest.mark.parametrize("path", [CHAT, COUNT])
def test_what_a_client_that_left_asked_for_is_not_computed(serve, path, monkeypatch):
    read = []
    monkeypatch.setattr(RequestHandler, "with_served_model", lambda handler, ask: read.append(ask))
    held = Event()
    gone = asyncio.Event()

    async def ask_and_leave():
        before = asyncio.create_task(READING.run(SMALL + 1, held.wait))
        asyncio.get_running_loop().call_later(0.2, gone.set)
        await drive(serve(), chat("w1 " * SMALL), gone=gone, path=path)
        held.set()
        await before
        await READING.run(SMALL + 1, int)  # after what was asked for

    asyncio.run(ask_and_leave())
    assert read == []


def test_a_template_that_takes_its_time_keeps_no_other_chat_waiting(serve, engine, monkeypatch):
    slow = "{% if messages[-1].content == 'w9' %}" + "{% for a in range(99999) %}" * 3
    slow += "{% endfor %}" * 3 + "{% endif %}"
    monkeypatch.setattr(engine.tokenizer._tokenizer, "chat_template", slow + CHAT_TEMPLATE)
    monkeypatch.setattr("ssmlx.templates.MAX_SECONDS", 3)
    app = serve()
    ended = []

    async def ask(text):
        await drive(app, chat(text, max_tokens=1))
        ended.append(text)

    async def both():
        await asyncio.gather(ask("w9"), ask("w1"))

    asyncio.run(both())
    assert ended == ["w1", "w9"]


# --- forms ---

NAMES = [f"name {number * 7919}" for number in range(10_001)]
LARGE = {
    "choices": {"structured_outputs": {"choice": NAMES}},
    "choices by bytes": {"structured_outputs": {"choice": ["x" * 1000] * 300}},
    "expression": {"guided_regex": "a?" * 5000},
    "pattern": {"guided_json": {"type": "string", "pattern": "a?" * 20_000}},
    "properties": {"guided_json": {"properties": {one: {} for one in NAMES}}},
    "grammar": {"guided_grammar": f"start: {'A? ' * 20_000}\nA: \"a\""},
    "names": {"guided_json": {"enum": ["y" * 99] * 9_000}},
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_a_form_that_takes_too_long_is_refused(byte_client, case):
    started = time.monotonic()
    found = byte_client.post(CHAT, json=chat("Hi", max_tokens=2, **LARGE[case]))
    assert found.status_code == 400, found.text
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("case", ["pattern", "properties"])
def test_tools_that_take_too_long_are_refused(byte_engine, byte_client, case, monkeypatch):
    shown = "{% if tools %}Tools. {% endif %}{# tool_call #}" + CHAT_TEMPLATE
    monkeypatch.setattr(byte_engine.tokenizer._tokenizer, "chat_template", shown)
    schema = {"type": "object", "properties": {"a": LARGE[case]["guided_json"]}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    found = byte_client.post(CHAT, json=chat("Hi", tools=tools, tool_choice="required"))
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tools"), found.text


def test_ten_thousand_choices_are_followed(byte_client):
    form = {"structured_outputs": {"choice": NAMES[:10_000]}}
    found = byte_client.post(CHAT, json=chat("Hi", max_tokens=60, n=2, temperature=1, **form))
    assert found.status_code == 200, found.text
    assert {one["message"]["content"] for one in found.json()["choices"]} <= {*NAMES}


def test_a_choice_may_begin_another():
    tokenizer = byte_tokenizer()
    form = grammars.read_grammar({"guided_choice": ['le"ft', 'le"ft\n é']})
    matcher = grammars.compiled_matcher(grammars.llguidance_tokenizer(tokenizer), form)
    mask = grammars.GrammarMask(matcher)
    for text, more in (('le"ft', "\n"), ('le"ft\n é', "")):
        logits = mask(tokenizer.encode(text), mx.zeros((1, 264)))[0]
        allowed = [tokenizer.decode([one]) for one in range(258) if logits[one].item() == 0]
        assert sorted(allowed) == sorted(filter(None, ["</s>", more]))


def test_a_form_is_compiled_once_for_all_choices_and_not_by_the_tokenizers_lock(
    byte_client, monkeypatch
):
    made = []

    def counted(*args, **more):
        made.append(args[1])
        return LLMatcher(*args, **more)

    counted.grammar_from_json_schema = LLMatcher.grammar_from_json_schema
    monkeypatch.setattr(grammars, "LLMatcher", counted)
    form = {"structured_outputs": {"choice": ["left", "right", "neither"]}}
    for _ in range(2):
        found = byte_client.post(CHAT, json=chat("Hi", n=6, temperature=2, seed=1, **form)).json()
        said = [one["message"]["content"] for one in found["choices"]]
        assert {*said} <= {*form["structured_outputs"]["choice"]} and len({*said}) > 1
    assert len(made) == 1


class Panic(BaseException):
    """As that of llguidance, which is no `Exception`."""


@pytest.mark.parametrize("failure", [ValueError("odd"), Panic("odd")])
def test_a_form_at_which_llguidance_fails_is_refused(byte_client, monkeypatch, failure):
    def failing(*args, **more):
        raise failure

    monkeypatch.setattr(grammars, "LLMatcher", failing)
    found = byte_client.post(CHAT, json=chat("Hi", guided_regex=f"new {type(failure)}"))
    assert found.status_code == 400 and "odd" in found.json()["error"]["message"]


def test_a_form_that_has_no_thread_may_be_asked_for_again(byte_client, monkeypatch):
    class Unstarted(Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    own = SimpleNamespace(Thread=Unstarted, stack_size=threading.stack_size)
    monkeypatch.setattr(grammars, "threading", own)
    found = byte_client.post(CHAT, json=chat("Hi", guided_regex="no thread"))
    assert found.status_code == 503 and "retry-after" in found.headers


def test_a_compiled_form_is_kept_by_its_request(byte_client, monkeypatch):
    made = []
    monkeypatch.setattr(
        grammars, "LLMatcher", lambda *args, **more: made.append(args) or LLMatcher(*args, **more)
    )
    take = AnswerSlots.take

    async def forget_and_wait(slots):
        grammars.compiled_matcher.cache_clear()
        await take(slots)

    monkeypatch.setattr(AnswerSlots, "take", forget_and_wait)
    found = byte_client.post(CHAT, json=chat("Hi", n=3, guided_choice=["kept", "forgotten"]))
    assert found.status_code == 200 and len(made) == 1, found.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_form_breaks_ends_with_an_error(byte_client, monkeypatch, stream):
    """llguidance then allows nothing but the end, and the text would be broken off as if whole."""
    monkeypatch.setattr(grammars, "_LIMITS", LLParserLimits(max_lexer_states=20))
    grammars.compiled_matcher.cache_clear()
    form = {"guided_regex": "(a|b)[a-z]{3,40}x(ab|ac)+"}
    found = byte_client.post(CHAT, json=chat("Hi", max_tokens=99, stream=stream, **form))
    grammars.compiled_matcher.cache_clear()
    assert "error" in found.text and '"stop"' not in found.text
    assert found.status_code == (200 if stream else 400)


DEEP_FORMS = """
import sys
sys.path[:0] = ["tests"]
from byte_tokenizers import byte_tokenizer
from ssmlx.errors import InputError
from ssmlx.server import grammars
from ssmlx.server.app import make_app

chain = [f'r{n}:"a"r{n + 1}' for n in range(9000)]
rules = "\\n".join(["start: r0", *chain, 'r9000: "x"'])
refs = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(3000)}
schema = {"$ref": "#/$defs/d0", "$defs": {**refs, "d3000": {"type": "null"}}}
for grammar in (rules, grammars.json_grammar(schema)):
    try:
        grammars.compiled_matcher(grammars.llguidance_tokenizer(byte_tokenizer()), grammar)
    except InputError as error:
        print("refused")
print("alive")
"""


@pytest.mark.slow
def test_no_form_ends_the_process():
    """In a process of its own: llguidance follows rules by recursion, without a bound."""
    run = subprocess.run(
        [sys.executable, "-c", DEEP_FORMS], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0 and run.stdout.endswith("alive\n"), run.stderr


# --- a real server, with others who ask ---


class Others:
    """A client that asks for /health and a token of a chat again and again, inside a block."""

    def __init__(self, served):
        self.served = served
        self.slowest = {"health": 0.0, "chat": 0.0}
        self.bad = []
        self.stop = Event()
        self.asked = 0

    def ask_again_and_again(self, kind, ask):
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                status = ask(timeout=60).status_code
            except httpx.HTTPError as error:
                status = repr(error)
            if status != 200:
                self.bad.append((kind, status))
            self.asked += 1
            self.slowest[kind] = max(self.slowest[kind], time.monotonic() - started)
            time.sleep(0.05)

    def __enter__(self):
        url = self.served.url
        asks = {
            "health": lambda **more: httpx.get(f"{url}/health", **more),
            "chat": lambda **more: httpx.post(f"{url}{CHAT}", json=chat(max_tokens=1), **more),
        }
        self.threads = [Thread(target=self.ask_again_and_again, args=one) for one in asks.items()]
        for one in self.threads:
            one.start()
        return self

    def __exit__(self, *failure):
        self.stop.set()
        for one in self.threads:
            one.join()


def send(served, head, body=b""):
    """A connection on which a request was sent."""
    one = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    one.sendall(head.replace("\n", "\r\n").encode() + body)
    return one


def post_and_leave(served, path, body, seconds):
    body = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    with suppress(OSError), send(served, f"{head}Content-Length: {len(body)}\n\n", body):
        time.sleep(seconds)


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def many(count):
    """A function that opens connections, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda served, *head: [stack.enter_context(send(served, *head)) for _ in range(count)]


@pytest.fixture(scope="module")
def served(bytes_model):
    with serving(bytes_model.parent, "--model", bytes_model, "--quiet") as served:
        httpx.post(f"{served.url}{CHAT}", json=chat(max_tokens=1), timeout=60)
        yield served


@pytest.mark.slow
def test_large_requests_keep_nobody_waiting(served):
    turns = {"messages": [{"role": "user", "content": "a"}] * 20_000}
    with Others(served) as others, ThreadPoolExecutor(8) as pool:
        for path, body in (
            (CHAT, chat("w1 " * 300_000)),
            (COUNT, turns),
            ("/v1/messages", turns),
            (COMPLETIONS, {"prompt": [5] * 400_000}),
        ):
            for _ in range(2):
                pool.submit(post_and_leave, served, path, body, 1)
    assert not others.bad and others.asked > 1
    assert max(others.slowest.values()) < SECONDS, others.slowest
    assert served.is_idle()


@pytest.mark.slow
def test_connections_without_a_request_end(served):
    """Silent ones, and those that send their head by drops; not one that was used."""
    begun = "POST /v1/chat/completions HTTP/1.1\nHost: localhost\n"
    with many(5) as silent, many(5) as dripping, many(1) as used:
        connections = silent(served, "")
        drops = dripping(served, begun)
        (kept,) = used(served, "GET /health HTTP/1.1\nHost: localhost\n\n")
        assert is_well(kept)
        started = time.monotonic()
        with Others(served) as others:
            while time.monotonic() - started < 13:
                for one in drops:
                    with suppress(OSError):
                        one.sendall(b"X-A: b\r\n")
                time.sleep(0.5)
        assert all(map(is_closed, connections + drops))
        assert not others.bad
        kept.sendall(GET)
        assert is_well(kept)


def attack_by_idle_connections(served, log, count):
    """Open connections that say nothing."""
    with Others(served) as others, ExitStack() as stack:
        for _ in range(count):
            with suppress(OSError):
                stack.enter_context(send(served, ""))
        time.sleep(3)
    assert not others.bad and max(others.slowest.values()) < SECONDS, (others.bad, others.slowest)
    assert len(log.read_text()) < 2000, log.read_text()[:2000]


@pytest.mark.slow
def test_more_connections_than_there_may_be_do_no_harm(served, bytes_model):
    log = bytes_model.parent / "server.log"
    attack_by_idle_connections(served, log, Limits().connections + 200)


@pytest.mark.long
def test_thousands_of_idle_connections_do_no_harm(served, bytes_model):
    """More than the 2,048 files that mlx-lm lets a process open."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip("this process may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    attack_by_idle_connections(served, bytes_model.parent / "server.log", 3500)


@pytest.mark.long
def test_the_largest_bodies_keep_nobody_waiting(served):
    with Others(served) as others, ThreadPoolExecutor(16) as pool:
        for path in (CHAT, COUNT) * 8:
            pool.submit(post_and_leave, served, path, chat("w1 " * 2_600_000), 2)
    assert not others.bad and max(others.slowest.values()) < SECONDS, (others.bad, others.slowest)
    assert served.is_idle()
