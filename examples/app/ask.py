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
    """Shows the end of each answer on a line of its own while it grows, on a terminal; then whole
    answers.
    """

    def __init__(self, questions: list[str]) -> None:
        """Start with an empty text for each question; nothing is drawn yet."""
        self.questions = questions
        self.texts = [""] * len(questions)
        self._live = sys.stderr.isatty()
        self._drawn = 0

    def append_and_redraw(self, number: int, text: str) -> None:
        """Add text to an answer, and draw all lines again if standard error is a terminal.

        Args:
            number: of the question, from 0 on.
            text: the next piece.
        """
        self.texts[number] += text
        if self._live:
            width = shutil.get_terminal_size().columns - 5
            lines = [" ".join(text.split())[-width:] for text in self.texts]
            up = f"\x1b[{self._drawn}F" if self._drawn else ""
            shown = "".join(f"\x1b[K{n}> {line}\n" for n, line in enumerate(lines, 1))
            print(up + shown, end="", file=sys.stderr, flush=True)
            self._drawn = len(lines)

    def print_whole_answers(self) -> None:
        """Print each question with the text of its answer so far, on standard output."""
        for question, text in zip(self.questions, self.texts, strict=True):
            print(f"\n{question}\n{text}", flush=True)


async def stream_answer_to_screen(
    engine: ssmlx.Engine, number: int, screen: Screen, max_tokens: int
) -> None:
    """Stream one answer onto the screen; where the task is cancelled, so is the answer.

    Args:
        engine: the model.
        number: of the question on the screen, from 0 on.
        screen: is changed.
        max_tokens: of the answer.
    """
    question = screen.questions[number]
    async with engine.stream(question, max_tokens=max_tokens) as segments:
        async for segment in segments:
            screen.append_and_redraw(number, segment.text)


async def answer_all_at_once(engine: ssmlx.Engine, screen: Screen, max_tokens: int) -> None:
    """Stream all answers at once, and wait for their ends; where one fails or Ctrl-C comes, all are
    cancelled.

    Raises:
        InputError: a question or a setting cannot be followed.
        ExceptionGroup: other errors of answers that failed.
    """
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
    """Ask the questions of the command line, and print the answers, whole or not.

    Args:
        argv: the words after the command; None for the process's own.

    Returns:
        The exit code: 0, 2 for a model that cannot be loaded or a setting that cannot be followed,
        130 for Ctrl-C.

    Raises:
        ExceptionGroup: what else made answers fail.
    """
    parser = argparse.ArgumentParser(description="Ask several questions at once.")
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", default="chat")
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ssmlx").setLevel(logging.INFO)
    if isinstance(sys.stdout, TextIOWrapper):  # a character that it cannot write ends nothing
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
