"""Libraries that others wrote, against a server in a process of its own: SDKs with their tool
runners, agents, typed results, an evaluation. Some have a virtual environment of their own."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

import httpx2 as httpx
import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner
from pydantic import BaseModel
from served import serving

from ssmlx.loading.load import cast_model
from ssmlx.loading.names import resolve_model

pytestmark = [pytest.mark.long, pytest.mark.real]

HERE = Path(__file__).parent
NAME = "smollm2"
PROMPT = "Anna is 31 years old. Who is she, and how old?"
TURNS = [{"role": "user", "content": PROMPT}]
TEMPLATE = """
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for turn in messages %}<|im_start|>{{ turn.role }}
{{ turn.content }}
{%- for call in turn.tool_calls or [] %}{% set tool_call = call.function %}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson -}}
}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
CALLS = [
    "Let me see. " + CALL % ("add", '{"a": 19, "b": 23}'),
    CALL % ("add", '{"a": 42, "b": 42}'),
]
END = "It is 84."
STORY = [*CALLS, END]
MADE = [42, 84]


class Person(BaseModel):
    """A person."""

    name: Literal["Anna", "Berta"]
    age: Literal[30, 31]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The real model, with a template that reads tools."""
    folder = tmp_path_factory.mktemp("peers") / NAME
    shutil.copytree(resolve_model("smollm2-135m"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(model):
    with serving(model.parent, "--model", model, "--max-tokens", 300) as served:
        yield served


def telling(model, answers):
    """A server whose answers are these."""
    return serving(model.parent, "--model", model, answers=answers)


@pytest.fixture(scope="module")
def reference(model):
    """The model as mlx-lm has it, in float32."""
    own, tokenizer = mlx_lm.load(str(model))
    return cast_model(own, "float32"), tokenizer


def openai_of(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def anthropic_of(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def generated(reference, prompt, length):
    """What mlx-lm answers, greedily."""
    own, tokenizer = reference
    greedy = make_sampler(temp=0)
    return mlx_lm.generate(own, tokenizer, prompt, max_tokens=length, sampler=greedy)


def continued(reference, prompt, length):
    """The text that mlx-lm's greedy tokens add to the prompt's, with the leading space that its
    own detokenizer drops."""
    own, tokenizer = reference
    greedy = make_sampler(temp=0)
    answer = mlx_lm.stream_generate(own, tokenizer, prompt, max_tokens=length, sampler=greedy)
    tokens = [*prompt, *(response.token for response in answer)]
    return tokenizer.decode(tokens)[len(tokenizer.decode(prompt)) :]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Makes a virtual environment with some packages; skips where there is no registry."""

    def make(*packages):
        folder = tmp_path_factory.mktemp("environment")
        python = folder / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", *packages]
        for command in ([sys.executable, "-m", "venv", folder], install):
            if subprocess.run(command).returncode:
                pytest.skip(f"needs {', '.join(packages)}, and a registry")
        return python

    return make


@pytest.fixture(scope="module")
def agents(environment):
    """The Python with the agents' libraries."""
    pydantic_ai = "pydantic-ai-slim[openai,anthropic]"
    return environment(pydantic_ai, "openai-agents", "smolagents[openai]")


@pytest.fixture(scope="module")
def instructor(environment):
    return environment("instructor")


@pytest.fixture(scope="module")
def lm_eval(environment):
    return environment("lm-eval[api]", "transformers")


def made_of(python, what, served):
    """What the function of `peers.py` makes of a server's answers."""
    command = [python, HERE / "peers.py", what, served.url, NAME]
    told = subprocess.check_output(command, timeout=600, env={**os.environ, "PYTHONPATH": ""})
    return json.loads(told.splitlines()[-1])


def refused(served):
    """How many requests were refused with 400."""
    told = httpx.get(f"{served.url}/metrics").text
    return sum(map(float, re.findall(r'ssmlx_refused_total{status="400"} (.*)', told)))


def assert_people(found, *, least=1):
    """Each is a person as `Person` has it."""
    people = [Person.model_validate(one) for one in found]
    assert len(people) >= least and all(one.name for one in people), found


def test_openai_holds_answers_to_a_model_of_pydantics(served):
    client = openai_of(served)
    asked = {"model": NAME, "messages": TURNS}
    typed = client.chat.completions.parse(**asked, response_format=Person)
    with client.chat.completions.stream(**asked, response_format=Person) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion()
    assert kinds[-1] == "content.done"
    assert typed.choices[0].message.parsed == streamed.choices[0].message.parsed
    told = client.responses.parse(model=NAME, input=PROMPT, text_format=Person)
    with client.responses.stream(model=NAME, input=PROMPT, text_format=Person) as events:
        last = events.get_final_response()
    assert told.output_parsed == last.output_parsed == typed.choices[0].message.parsed
    assert isinstance(told.output_parsed, Person)


def test_openai_calls_a_tool_that_has_to_be_called(served):
    client = openai_of(served)
    tool = openai.pydantic_function_tool(Person)
    asked = {"model": NAME, "messages": TURNS, "tools": [tool], "tool_choice": "required"}
    asked["parallel_tool_calls"] = False
    whole = client.chat.completions.parse(**asked).choices[0]
    with client.chat.completions.stream(**asked) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion().choices[0]
    (call,), (again,) = whole.message.tool_calls, streamed.message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds and whole.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Person)
    assert call.function.parsed_arguments == again.function.parsed_arguments
    flat = {"type": "function", **tool["function"]}
    own = {"model": NAME, "input": PROMPT, "tools": [flat], "parallel_tool_calls": False}
    told = client.responses.parse(**own, tool_choice={"type": "function", "name": "Person"})
    assert Person.model_validate_json(told.output[0].arguments)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "eager": True}])
def test_openais_tool_runner(model, more):
    def add(arguments):
        made.append(arguments["a"] + arguments["b"])
        return str(made[-1])

    made = []
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    tool = {"type": "function", "name": "add", "parameters": parameters, "strict": False}
    with telling(model, STORY) as served:
        runner = ResponsesToolRunner(functions=[RegisteredFunction(tool, add)])
        last = runner.run(openai_of(served), {"model": NAME, "input": PROMPT}, **more)
    assert (last.output_text, made) == (END, MADE)


def test_anthropic_holds_answers_to_a_model_of_pydantics(served):
    client = anthropic_of(served)
    asked = {"model": NAME, "messages": TURNS, "max_tokens": 200}
    told = client.messages.parse(**asked, output_format=Person).parsed_output
    beta = client.beta.messages.parse(**asked, output_format=Person).parsed_output
    with client.messages.stream(**asked, output_format=Person) as events:
        last = events.get_final_message().parsed_output
    assert isinstance(told, Person) and told == beta == last
    tool = {"name": "tell", "input_schema": Person.model_json_schema()}
    called = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    assert_people(block.input for block in called.content)
    assert called.stop_reason == "tool_use"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"thread": False}])
def test_anthropics_tool_runner(model, more):
    """A thread is refused once, and the whole conversation is sent then."""

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds."""
        made.append(a + b)
        return str(a + b)

    made = []
    with telling(model, STORY) as served:
        beta = anthropic_of(served).beta.messages
        asked = {"model": NAME, "messages": TURNS, "max_tokens": 200, "tools": [add]}
        last = beta.tool_runner(**asked, **more).until_done()
        assert refused(served) == ("thread" not in more)
    assert (last.content[0].text, made) == (END, MADE)


def test_instructor(served, instructor):
    found = made_of(instructor, "instructor_forced", served)
    assert_people(found.pop("iterable"))
    assert_people(found.values(), least=5)


def test_pydantic_ai(model, served, agents):
    assert_people(made_of(agents, "pydantic_ai_forced", served).values(), least=6)
    with telling(model, [*CALLS, CALL % ("final_result", '{"total": 84}')] * 6) as told:
        found = made_of(agents, "pydantic_ai_story", told)
    assert found.pop("made") == MADE * 6 and [*found.values()] == [84] * 6


def test_smolagents(model, served, agents):
    assert made_of(agents, "smolagents_forced", served)["said"]
    with telling(model, [*CALLS, CALL % ("final_answer", '{"answer": "84"}')] * 2) as told:
        found = made_of(agents, "smolagents_story", told)
    assert found == {"run": "84", "streamed": "84", "made": MADE * 2}


def test_openai_agents(model, served, agents):
    assert_people(made_of(agents, "openai_agents_forced", served).values(), least=4)
    with telling(model, STORY * 4) as told:
        found = made_of(agents, "openai_agents_story", told)
    assert found.pop("made") == MADE * 4 and [*found.values()] == [END] * 4


def test_llm(served, reference, tmp_path):
    pytest.importorskip("llm")
    one = {"model_id": "mine", "model_name": NAME, "api_base": f"{served.url}/v1"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([one]))  # JSON is YAML
    command = [sys.executable, "-m", "llm", "-m", "mine", "-o", "max_tokens", "12"]
    own = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    for more in ([], ["--no-stream"]):
        told = subprocess.check_output([*command, *more, PROMPT], env=own, text=True)
        assert told.strip() == answered(reference).strip()


def answered(reference):
    """What mlx-lm says to `PROMPT`, in 12 tokens."""
    prompt = reference[1].apply_chat_template(TURNS, add_generation_prompt=True)
    return generated(reference, prompt, 12)


PACKAGES = ("openai", "ai@6", "@ai-sdk/openai-compatible@2", "@openai/agents", "@anthropic-ai/sdk",
            "zod@4")  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Runs the clients from npm; skips where there is no node, or no registry."""
    folder = tmp_path_factory.mktemp("node")
    npm = shutil.which("npm")
    install = [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
    if not npm or subprocess.run(install, cwd=folder).returncode:
        pytest.skip("needs npm, and its registry")
    shutil.copy(HERE / "peers.mjs", folder)

    def run(served, what):
        command = ["node", "peers.mjs", what, served.url, NAME]
        return json.loads(subprocess.check_output(command, cwd=folder, timeout=600))

    return run


def test_clients_from_npm(served, reference, node):
    assert [*node(served, "texts").values()] == [answered(reference)] * 6
    assert_people(node(served, "forced").values(), least=6)


def test_agents_and_tool_runners_from_npm(model, node):
    """By either API: two calls of a tool, then an answer."""
    with telling(model, STORY * 10) as served:
        found = node(served, "stories")
        assert refused(served) == 2  # threads
    assert found.pop("made") == MADE * 10 and [*found.values()] == [END] * 10


SENTENCES = [
    ("The capital of France is", " Paris"),
    ("The opposite of hot is", " cold"),
    ("Two plus two is", " seventeen"),
    ("Water boils at 100 degrees", " Celsius"),
    ("The sky is", " made of yellow cheese"),
    ("Once upon a time, there was a", " little girl"),
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
"""
SCORED = """metric_list:
  - metric: acc
  - metric: perplexity
"""
WRITTEN = """generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 16
  do_sample: false
metric_list:
  - metric: exact_match
"""


def loglikelihood(reference, text, target):
    """Of the target behind the text, in float64; and whether it is what greedy decoding says."""
    own, tokenizer = reference
    first = len(tokenizer.encode(text, add_special_tokens=False))
    tokens = tokenizer.encode(text + target, add_special_tokens=False)
    logits = own(mx.array([tokens[:-1]]))[0, first - 1 :]
    wanted = mx.array(tokens[first:])[:, None]
    logprobs = mx.take_along_axis(logits - mx.logsumexp(logits, -1, keepdims=True), wanted, -1)
    return math.fsum(logprobs.flatten().tolist()), mx.argmax(logits, -1).tolist() == tokens[first:]


def until(text):
    """What stands before the first of the texts that end an answer."""
    return text.split("\n")[0].split(".")[0]


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval(served, reference, lm_eval, model, tmp_path, tokenized):
    """It scores texts, and has them written, as mlx-lm does."""
    scores = [loglikelihood(reference, *one) for one in SENTENCES]
    ids = [reference[1].encode(text, add_special_tokens=False) for text, _ in SENTENCES]
    written = [until(continued(reference, one, 16)) for one in ids]
    # Every other answer is the one that is looked for.
    wanted = [text if n % 2 else f"{text}?" for n, text in enumerate(written)]
    kinds = {"scored": ("loglikelihood", SCORED), "written": ("generate_until", WRITTEN)}
    targets = {"scored": [target for _, target in SENTENCES], "written": wanted}
    for name, (kind, more) in kinds.items():
        data = tmp_path / f"{name}.jsonl"
        pairs = zip(SENTENCES, targets[name], strict=True)
        lines = [json.dumps({"text": text, "target": target}) for (text, _), target in pairs]
        data.write_text("\n".join(lines))
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind) + more)
    options = {"model": NAME, "base_url": f"{served.url}/v1/completions", "tokenizer": model}
    options |= {"num_concurrent": 2, "tokenized_requests": tokenized}
    told = ",".join(f"{name}={value}" for name, value in options.items())
    command = [
        lm_eval, "-m", "lm_eval", "--model", "local-completions", "--model_args", told,
        "--tasks", "scored,written", "--include_path", tmp_path, "--batch_size", "3",
        "--output_path", tmp_path / "out", "--log_samples",
    ]  # fmt: skip
    own = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run(command, check=True, env=own, timeout=600)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    samples = {}
    for name in kinds:
        (path,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        lines = map(json.loads, path.read_text().splitlines())
        samples[name] = [one["resps"][0][0] for one in sorted(lines, key=lambda one: one["doc_id"])]
    heard = [(float(logprob), str(is_greedy) == "True") for logprob, is_greedy in samples["scored"]]
    assert [greedy for _, greedy in heard] == [greedy for _, greedy in scores]
    logprobs = [logprob for logprob, _ in scores]
    assert [logprob for logprob, _ in heard] == pytest.approx(logprobs, rel=1e-4)
    accuracy = sum(greedy for _, greedy in scores) / len(scores)
    assert 0 < accuracy < 1 and found["scored"]["acc,none"] == accuracy
    perplexity = math.exp(-math.fsum(logprobs) / len(scores))
    assert found["scored"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
    assert [until(text) for text in samples["written"]] == samples["written"] == written
    assert found["written"]["exact_match,none"] == 0.5
