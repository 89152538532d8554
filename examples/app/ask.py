"""Two questions, answered at once by one engine. Ctrl-C cancels both.

python examples/app/ask.py
python examples/app/ask.py "Name three rivers." "What is a monsoon?"
"""

import argparse
import asyncio
import logging
import shutil
import sys
from io import TextIOWrapper

import ssmlx

QUESTIONS = ("Write a short poem about the sea.", "Why is the sky blue?")


class Screen:
    """On a terminal, shows the end of each growing answer on its own line; then whole answers."""

    def __init__(self, questions: list[str]) -> None:
        self.questions = questions
        self.texts = [""] * len(questions)
        self._live = sys.stderr.isatty()
        self._drawn = 0

    def append(self, number: int, text: str) -> None:
        self.texts[number] += text
        if self._live:
            width = shutil.get_terminal_size().columns - 5
            lines = [" ".join(text.split())[-width:] for text in self.texts]
            up = f"\x1b[{self._drawn}F" if self._drawn else ""
            shown = "".join(f"\x1b[K{n}> {line}\n" for n, line in enumerate(lines, 1))
            print(up + shown, end="", file=sys.stderr, flush=True)
            self._drawn = len(lines)

    def print_whole_answers(self) -> None:
        for question, text in zip(self.questions, self.texts, strict=True):
            print(f"\n{question}\n{text}", flush=True)


async def stream_answer_to_screen(
    engine: ssmlx.Engine, number: int, screen: Screen, max_tokens: int
) -> None:
    """Stream one answer; cancelling the task cancels the answer."""
    question = screen.questions[number]
    async with engine.stream(question, max_tokens=max_tokens) as segments:
        async for segment in segments:
            screen.append(number, segment.text)


async def answer_all_at_once(engine: ssmlx.Engine, screen: Screen, max_tokens: int) -> None:
    """Answer all questions at once; if one fails or on Ctrl-C, all are cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(screen.questions)):
                tasks.create_task(stream_answer_to_screen(engine, number, screen, max_tokens))
    except ExceptionGroup as failed:
        mistakes, others = failed.split(ssmlx.InputError)
        if mistakes is None or others is not None:
            raise
        raise mistakes.exceptions[0] from None


def main(argv: list[str] | None = None) -> int:
    """Run the example; exit code 2 for an invalid model or setting, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(description="Ask several questions at once.")
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", default="chat")
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ssmlx").setLevel(logging.INFO)
    if isinstance(sys.stdout, TextIOWrapper):  # replaces characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    screen = Screen(args.questions)
    try:
        with ssmlx.Engine(args.model, adapters=(args.adapter,)) as engine:
            asyncio.run(answer_all_at_once(engine, screen, args.max_tokens))
    except ssmlx.InputError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cancelled", file=sys.stderr)
        return 130
    finally:
        screen.print_whole_answers()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
