"""Mixed requests of eight clients at once, for minutes: memory and threads stay, answers are right.

The bound of what texts take is so low that kept prompts go all the time, and no request is refused.

`pytest -m long tests/test_server_soak.py` asks 400 times, then 2,000 times.
"""

import json
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import httpx2 as httpx
import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
psutil = pytest.importorskip("psutil")

from byte_tokenizers import write_byte_tokenizer
from mlx_lm.utils import load_config, save_config
from real import write_base, write_tiny_adapter
from served import serving

CLIENTS = 8
GAUGE = r'ssmlx_memory_bytes{kind="(\w+)"} (\S+)'
LENGTH = 24
NAMES = ("tiny", "tiny:own")
TEXTS = [f"Question {n}: what follows {'abcdefgh'[n % 8] * (n + 1)}?" for n in range(16)]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
FORM = {
    "type": "object",
    "properties": {
        "name": {"enum": ["one", "two"]},
        "tags": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
MEMORY = 6 * 2**20
"""Bytes that texts may take: 0.2 MiB of a running answer, of which there are eight at once; prompts
that nobody asks again would fill it several times."""
MOST_GROWN = 16.0
"""MiB that a process may grow by behind the first quarter of the requests, in which caches fill."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    base = write_base(folder / "tiny", context=4096, vocab=264)
    end = write_byte_tokenizer(base)
    config = load_config(base)
    save_config({**config, "bos_token_id": end - 1, "eos_token_id": end}, base / "config.json")
    write_tiny_adapter(folder / "own", base)
    return folder


class Clients:
    """Both APIs' clients of one server, and what each kind of request is to be answered with."""

    def __init__(self, served):
        more = {"api_key": "none", "max_retries": 0, "timeout": 120}
        self.port = served.port
        self.openai = openai.OpenAI(base_url=f"{served.url}/v1", **more)
        self.anthropic = anthropic.Anthropic(base_url=served.url, **more)

    def chat(self, name, text, *, stream=False, most=None, **more):
        """What is said; of a stream its first chunks, after which the client hangs up."""
        turns = [{"role": "user", "content": text}]
        own = {"model": name, "messages": turns, "max_tokens": LENGTH, **more}
        reply = self.openai.chat.completions.create(**own, stream=stream)
        if not stream:
            return [one.message.content for one in reply.choices]
        with reply as chunks:
            texts = (one.choices[0].delta.content or "" for one in chunks)
            return ["".join(islice(texts, most))]

    def completions(self, name, prompts, **more):
        reply = self.openai.completions.create(
            model=name, prompt=prompts, **{"max_tokens": LENGTH, **more}
        )
        return [one.text for one in reply.choices]

    def scores(self, name, prompts):
        reply = self.openai.completions.create(
            model=name, prompt=prompts, max_tokens=1, logprobs=1, echo=True
        )
        told = [one.logprobs.token_logprobs for one in reply.choices]
        assert all(first is None for first, *_ in told)
        return [round(sum(others[:-1]), 2) for _, *others in told]

    def message(self, name, text, *, stream=False):
        turns = [{"role": "user", "content": text}]
        own = {"model": name, "messages": turns, "max_tokens": LENGTH}
        if not stream:
            return ["".join(one.text for one in self.anthropic.messages.create(**own).content)]
        with self.anthropic.messages.stream(**own) as events:
            return ["".join(events.text_stream)]

    def response(self, name, text):
        own = {"model": name, "input": text, "max_output_tokens": LENGTH}
        return [self.openai.responses.create(**own).output_text]

    def schema(self, name, text):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM}}
        more = {"response_format": form, "max_tokens": 400}
        (said,) = self.chat(name, text, **more)
        found = json.loads(said)
        assert found["name"] in ("one", "two") and len(found["tags"]) <= 2, said
        return [said]

    def leave(self, name, text, seconds):
        """Hang up without a word."""
        body = json.dumps({"model": name, "prompt": [text] * 3, "max_tokens": 2000, "stream": True})
        heads = "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"
        with socket.create_connection(("127.0.0.1", self.port)) as one:
            one.sendall("\r\n".join(("POST /v1/completions HTTP/1.1", *heads, "", body)).encode())
            time.sleep(seconds)


def kinds(clients):
    """What may be asked, by what it is called: of a name and a text, the same answer each time."""
    sampled = {"temperature": 0.8, "seed": 7, "n": 3}
    pair = [TEXTS[0], TEXTS[5]]
    return {
        "chat": clients.chat,
        "streamed": lambda name, text: clients.chat(name, text, stream=True),
        "tools": lambda name, text: clients.chat(name, text, tools=TOOLS),
        "choices": lambda name, text: clients.completions(name, text, **sampled),
        "list": lambda name, text: clients.completions(name, [text, *pair]),
        "scores": lambda name, text: clients.scores(name, [text, *pair]),
        "schema": clients.schema,
        "message": clients.message,
        "events": lambda name, text: clients.message(name, text, stream=True),
        "response": clients.response,
    }


def grown(sizes):
    """What a process grew by behind the first quarter of its requests, at most."""
    first = sizes[len(sizes) // 4 - 1]
    return max(sizes) - first


def texts_of(served):
    """Bytes of what texts take, by kind, as the metrics tell them."""
    told = httpx.get(f"{served.url}/metrics", timeout=60).text
    return {kind: float(size) for kind, size in re.findall(GAUGE, told)}


@pytest.mark.parametrize(
    "count",
    [pytest.param(400, marks=pytest.mark.long), pytest.param(2000, marks=pytest.mark.long)],
)
def test_eight_clients_of_all_kinds_leave_nothing_behind(tiny, count):
    options = ("--model", tiny / "tiny", "--adapter", tiny / "own", "--temp", 0)
    options += ("--memory", MEMORY / 2**30)
    with serving(tiny, *options) as served:
        clients = Clients(served)
        asks = kinds(clients)
        alone = {}
        for name in NAMES:
            for text in TEXTS[:: len(TEXTS) // 4]:
                for kind, ask in asks.items():
                    alone[kind, name, text] = ask(name, text)
        process = psutil.Process(served.process.pid)
        made = Counter()

        def ask(number):
            rng = random.Random(number)
            kind, name, text = rng.choice([*alone])
            expected = alone[kind, name, text]
            if rng.random() < 0.2:
                made["hung up"] += 1
                clients.leave(name, f"{number}: {text}" * 4, rng.choice((0.0, 0.01, 0.1)))
                most = rng.randrange(LENGTH)
                (said,) = clients.chat(name, text, stream=True, most=most)
                is_same = alone["streamed", name, text][0].startswith(said)
                return [] if is_same else [("hung up", name, text, said)]
            made[kind] += 1
            found = asks[kind](name, text)
            return [] if found == expected else [(kind, name, text, found, expected)]

        sizes = []
        threads = []
        texts = []
        wrong = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            for first in range(0, count, count // 20):
                for found in pool.map(ask, range(first, first + count // 20)):
                    wrong += found
                sizes.append(process.memory_info().rss / 2**20)
                threads.append(process.num_threads())
                texts.append(texts_of(served))
        is_idle = served.is_idle()
        left = texts_of(served)
        threads.append(process.num_threads())
    print(f"{sum(made.values())} requests: {dict(made)}; MiB {[round(one) for one in sizes]}")
    kept = [round(one["kept"] / 2**20, 1) for one in texts]
    print(f"threads {threads}; MiB of kept prompts {kept}")
    assert wrong == [] and is_idle
    assert threads[-1] <= threads[len(sizes) // 4 - 1], threads
    assert all(one["running"] + one["kept"] <= one["limit"] == MEMORY for one in texts)
    assert max(kept) > 0.6 * MEMORY / 2**20, "it is filled"
    assert left["running"] == 0
    assert grown(sizes) < MOST_GROWN, sizes
