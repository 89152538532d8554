"""A small program as an app's developer writes it, under `mypy --strict` and pyright.

`.ci/wheel` checks it against the installed wheel: what `ssmlx` exports has types.
"""

from pathlib import Path
from typing import NamedTuple

import ssmlx


class Assistant:
    """Answers questions with one model, and counts what its drafts saved."""

    def __init__(
        self,
        model: str | Path,  # a folder, a Hub name or an alias
        *,
        # memory for texts beside the weights; None for ssmlx's default
        memory_gb: float | None = None,
    ) -> None:
        self.engine = ssmlx.Engine(model, memory_gb=memory_gb)
        self.saved_calls = 0

    def ask(self, question: str, adapter: str | None = None) -> str:
        """Answer a question; returns an empty text if there is no memory for it."""
        config = ssmlx.GenerateConfig(max_tokens=40, temp=0.0, stop=("\n\n",))
        text = ""
        last: ssmlx.GenerationResponse | None = None
        try:
            with self.engine.stream(question, config, adapter=adapter) as answer:
                for segment in answer:
                    text += segment.text
                    last = segment
        except ssmlx.NoRoomError:
            return ""
        if last is not None:
            self.saved_calls += last.generation_tokens - last.target_calls
        return text

    async def ask_async(self, question: str) -> str:
        async with self.engine.stream(question, max_tokens=40) as answer:
            pieces: list[str] = [segment.text async for segment in answer]
        return "".join(pieces)

    def chat(self) -> ssmlx.ChatSession:
        return self.engine.chat(ssmlx.GenerateConfig(tree=ssmlx.TreeConfig(size=8)))

    def close(self) -> None:
        self.engine.close()


class MeasuredAnswer(NamedTuple):
    text: str
    tokens_per_call: float


def answer_once(model: str, question: str) -> MeasuredAnswer:
    """Answer with the adapter that ssmlx chooses, without an engine."""
    loaded, tokenizer = ssmlx.load(model)
    prompt: list[int] = ssmlx.prompt_tokens(question, loaded, tokenizer)
    responses = list(ssmlx.stream_generate(loaded, tokenizer, prompt, max_tokens=40))
    text: str = "".join(one.text for one in responses)
    return MeasuredAnswer(text, responses[-1].tokens_per_call)
