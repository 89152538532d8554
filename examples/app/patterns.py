"""Patterns for an app: a time-out, a cancel button, closing, other processes.

python examples/app/patterns.py
python examples/app/patterns.py --model mlx-community/Qwen3-4B-4bit
"""

import argparse
import asyncio
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import ssmlx

QUESTIONS = ("Name three primary colours.", "What is a monsoon?")


class AnswerSoFar(NamedTuple):
    """The text that came in time, and whether it is the whole answer."""

    text: str
    is_whole: bool


async def answer_within(
    engine: ssmlx.Engine, question: str, seconds: float, max_tokens: int = 256
) -> AnswerSoFar:
    """Answer a question within some seconds; then the answer is cancelled."""
    pieces: list[str] = []
    try:
        async with asyncio.timeout(seconds):
            # Leaving the block cancels the answer, also by the time-out.
            async with engine.stream(question, max_tokens=max_tokens) as answer:
                async for segment in answer:
                    pieces.append(segment.text)
    except TimeoutError:
        return AnswerSoFar("".join(pieces), is_whole=False)
    return AnswerSoFar("".join(pieces), is_whole=True)


async def answer_until_enough(
    engine: ssmlx.Engine, question: str, is_enough: Callable[[str], bool]
) -> str:
    """Answer until `is_enough` accepts the text so far, as for a Stop button."""
    text = ""
    async with engine.stream(question, max_tokens=2000) as answer:
        async for segment in answer:
            text += segment.text
            if is_enough(text):
                answer.cancel()  # does not wait; the loop ends after the running call
    return text


async def close_engine_during_answers(engine: ssmlx.Engine, questions: Sequence[str]) -> list[str]:
    """Close the engine once each answer has begun: the answers are cancelled, without errors."""
    begun = [asyncio.Event() for _ in questions]

    async def read_to_end(number: int) -> str:
        text = ""
        async for segment in engine.stream(questions[number], max_tokens=2000):
            text += segment.text
            begun[number].set()
        return text

    reading = [asyncio.create_task(read_to_end(number)) for number in range(len(questions))]
    for event in begun:
        await event.wait()
    await asyncio.to_thread(engine.close)  # it blocks: not on the event loop's thread
    return list(await asyncio.gather(*reading))


def answer_in_this_process(model: str, question: str, max_tokens: int) -> str:
    with ssmlx.Engine(model) as engine:
        return "".join(one.text for one in engine.stream(question, max_tokens=max_tokens))


def answer_in_another_process(model: str, question: str, max_tokens: int) -> str:
    """Answer in a spawned process, since a forked one cannot use MLX."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(answer_in_this_process, model, question, max_tokens).result()


async def print_each_pattern(model: str) -> None:
    engine = await asyncio.to_thread(ssmlx.Engine, model)
    answer = await answer_within(engine, QUESTIONS[0], seconds=1)
    print(f"within a second ({'whole' if answer.is_whole else 'cut'}): {answer.text}")
    text = await answer_until_enough(engine, QUESTIONS[1], lambda text: len(text.split()) >= 10)
    print(f"cancelled after ten words: {text}")
    for text in await close_engine_during_answers(engine, QUESTIONS):
        print(f"engine closed after: {text}")


def main(argv: list[str] | None = None) -> int:
    """Run the example; exit code 2 for a model that cannot be loaded."""
    parser = argparse.ArgumentParser(description="Time-outs, cancelling, closing, processes.")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args(argv)
    try:
        asyncio.run(print_each_pattern(args.model))
        text = answer_in_another_process(args.model, QUESTIONS[0], 20)
    except ssmlx.InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"in another process: {text}")
    return 0


if __name__ == "__main__":  # a spawned process imports this file without running it
    raise SystemExit(main())
