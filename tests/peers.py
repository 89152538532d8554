"""Libraries that others wrote, asking a server: `python tests/peers.py WHAT URL MODEL` prints what
they make of its answers, as a line of JSON. It runs in an environment of theirs, without ssmlx.

What ends in `_story` expects a server whose answers are those of `STORY` in `test_server_peers.py`:
two calls of the tool `add`, then an end. What ends in `_forced` asks a model that has no choice.
"""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel

PROMPT = "Anna is 31 years old. Who is she, and how old?"
ADD = "What is 19 + 23, and twice that?"


class Person(BaseModel):
    """A person."""

    name: Literal["Anna", "Berta"]
    age: Literal[30, 31]


class Sum(BaseModel):
    """The sum of all."""

    total: int


def openai_clients(url):
    """OpenAI's client and its asynchronous one for a server."""
    import openai

    own = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return openai.OpenAI(**own), openai.AsyncOpenAI(**own)


def instructor_forced(url, model):
    """Answers of instructor in each of its modes, as dictionaries by mode."""
    import instructor
    from instructor import Mode

    client, _ = openai_clients(url)
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_retries": 0, "model": model}
    found = {}
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        own = instructor.from_openai(client, mode=mode)
        found[mode.name] = own.create(response_model=Person, **asked).model_dump()
    own = instructor.from_openai(client, mode=Mode.TOOLS)
    *_, last = own.create_partial(response_model=Person, **asked)
    found["partial"] = last.model_dump()
    own = instructor.from_openai(client, mode=Mode.JSON_SCHEMA)
    found["iterable"] = [
        one.model_dump() for one in own.create_iterable(response_model=Person, **asked)
    ]
    return found


def pydantic_models(url, name):
    """pydantic-ai's models for the three APIs, by name."""
    import anthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    first = OpenAIProvider(openai_client=openai_clients(url)[1])
    own = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    second = AnthropicProvider(anthropic_client=own)
    return {
        "chat": OpenAIChatModel(name, provider=first),
        "responses": OpenAIResponsesModel(name, provider=first),
        "messages": AnthropicModel(
            name, provider=second, profile={"supports_json_schema_output": True}
        ),
    }


def pydantic_ai_forced(url, name):
    """Typed results of pydantic-ai, by a tool and by a schema, for each API."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    async def run():
        found = {}
        for api, model in pydantic_models(url, name).items():
            for form in (ToolOutput, NativeOutput):
                agent = Agent(model, output_type=form(Person), retries=0)
                result = await agent.run(PROMPT, model_settings={"max_tokens": 200})
                found[f"{api} {form.__name__}"] = result.output.model_dump()
        return found

    return asyncio.run(run())


def pydantic_ai_story(url, name):
    """An agent of pydantic-ai with a tool and a typed result, whole and streamed, for each API."""
    from pydantic_ai import Agent

    async def run():
        found, made = {}, []
        for api, model in pydantic_models(url, name).items():
            agent = Agent(model, output_type=Sum, retries=0)

            @agent.tool_plain
            def add(a: int, b: int) -> int:
                """Adds."""
                made.append(a + b)
                return a + b

            found[api] = (await agent.run(ADD)).output.total
            async with agent.run_stream(ADD) as result:
                found[f"{api} streamed"] = (await result.get_output()).total
        return {"made": made, **found}

    return asyncio.run(run())


def smolagents_agent(url, model, **more):
    """A tool-calling agent of smolagents; `more` are its arguments."""
    from smolagents import OpenAIServerModel, ToolCallingAgent

    own = OpenAIServerModel(model, api_base=f"{url}/v1", api_key="none", max_tokens=200)
    return ToolCallingAgent(model=own, verbosity_level=0, **more)


def smolagents_forced(url, model):
    """An agent that can call nothing but its final answer."""
    return {"said": smolagents_agent(url, model, tools=[], max_steps=1).run(PROMPT)}


def smolagents_story(url, model):
    """An agent of smolagents with a tool, whole and streamed."""
    from smolagents import tool

    made = []

    @tool
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: a number
            b: another one
        """
        made.append(a + b)
        return a + b

    def ask(**more):
        return smolagents_agent(url, model, tools=[add], max_steps=4, **more).run(ADD)

    return {"run": ask(), "streamed": ask(stream_outputs=True), "made": made}


def openai_agents(url, name):
    """OpenAI's agents library, and its models by API."""
    import agents

    agents.set_tracing_disabled(True)
    _, client = openai_clients(url)
    return agents, {
        "chat": agents.OpenAIChatCompletionsModel(name, client),
        "responses": agents.OpenAIResponsesModel(name, client),
    }


def openai_agents_forced(url, name):
    """A forced tool call and a typed result of OpenAI's agents, for each API."""
    agents, models = openai_agents(url, name)

    @agents.function_tool
    def tell(name: Literal["Anna", "Berta"], age: Literal[30, 31]) -> str:
        """Tells who somebody is."""
        return Person(name=name, age=age).model_dump_json()

    async def run():
        found = {}
        settings = agents.ModelSettings(tool_choice="required", max_tokens=200)
        once = {"tool_use_behavior": "stop_on_first_tool", "model_settings": settings}
        for api, model in models.items():
            agent = agents.Agent("teller", model=model, tools=[tell], **once)
            found[f"{api} tool"] = json.loads((await agents.Runner.run(agent, PROMPT)).final_output)
            agent = agents.Agent("typed", model=model, output_type=Person)
            found[f"{api} typed"] = (
                await agents.Runner.run(agent, PROMPT)
            ).final_output.model_dump()
        return found

    return asyncio.run(run())


def openai_agents_story(url, name):
    """An agent of OpenAI's library with a tool, whole and streamed, for each API."""
    agents, models = openai_agents(url, name)
    made = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds."""
        made.append(a + b)
        return a + b

    async def run():
        found = {}
        for api, model in models.items():
            agent = agents.Agent("adder", model=model, tools=[add], instructions="Add.")
            found[api] = (await agents.Runner.run(agent, ADD)).final_output
            streamed = agents.Runner.run_streamed(agent, ADD)
            kinds = {event.type async for event in streamed.stream_events()}
            assert "run_item_stream_event" in kinds
            found[f"{api} streamed"] = streamed.final_output
        return {"made": made, **found}

    return asyncio.run(run())


if __name__ == "__main__":
    what, url, model = sys.argv[1:]
    found = globals()[what](url, model)
    print(f"\n{json.dumps(found)}")  # behind what others have printed
