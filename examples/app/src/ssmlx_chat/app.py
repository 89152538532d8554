"""A window in which a user chooses an adapter, asks, watches the answer grow, and can stop it."""

import asyncio

import toga
from toga.style.pack import COLUMN, ROW

import ssmlx

MODEL = "smollm2-135m"
CHAT = "chat"
ADAPTERS = (CHAT, "sql", "e2e")
MAX_TOKENS = 1024


class ChatApp(toga.App):  # type: ignore[misc]  # checked without toga, which has the types
    """The window. Its thread reads answers; other threads load and close the engine."""

    engine: ssmlx.Engine | None = None
    _loading: asyncio.Task[ssmlx.Engine] | None = None
    _answer: ssmlx.Answer[ssmlx.GenerationResponse] | None = None
    _is_closing = False

    def startup(self) -> None:
        self.adapter = toga.Selection(items=ADAPTERS)
        self.text = toga.MultilineTextInput(readonly=True, flex=1)
        self.question = toga.TextInput(placeholder="Ask", on_confirm=self.ask, flex=1)
        self.ask_button = toga.Button("Ask", on_press=self.ask, enabled=False)
        self.stop_button = toga.Button("Stop", on_press=self.stop, enabled=False)
        self.status = toga.Label("Loading the model")
        asking = [self.question, self.ask_button, self.stop_button]
        rows = [self.adapter, self.text, toga.Box(asking, direction=ROW, gap=8), self.status]
        self.main_window = toga.MainWindow(title=self.formal_name, size=(640, 480))
        self.main_window.content = toga.Box(rows, direction=COLUMN, margin=10, gap=8)
        self.main_window.show()

    async def on_running(self) -> None:
        """Load the model once the window is shown; then questions can be asked."""
        self._loading = asyncio.create_task(asyncio.to_thread(self._load_engine))
        try:
            self.engine = await self._loading
        except ssmlx.InputError as error:
            self.status.text = str(error)
        else:
            config = ssmlx.GenerateConfig(max_tokens=MAX_TOKENS)
            self.chat = self.engine.chat(config, adapter=CHAT)
            self.status.text = "Ready"
            self.ask_button.enabled = True

    def _load_engine(self) -> ssmlx.Engine:
        """Load the engine on the calling thread."""
        cache = self.paths.cache
        return ssmlx.Engine(
            MODEL, ADAPTERS, cache_dir=cache, progress=self._show_or_refuse_download
        )

    def _show_or_refuse_download(self, done_bytes: int, total_bytes: int) -> None:
        """Called on the loading thread with a download's progress; closing the window ends it."""
        if self._is_closing:
            raise ssmlx.InputError("the window is closed", expected="it open", do="start again")
        text = f"Downloading the model: {done_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB"
        self.loop.call_soon_threadsafe(setattr, self.status, "text", text)

    async def ask(self, widget: toga.Widget) -> None:
        """Answer one question at a time; an error is shown in the status line."""
        question = self.question.value.strip()
        if question and self.ask_button.enabled:
            self.question.value = ""
            self.ask_button.enabled = False
            self._append_text(f"> {question}\n")
            try:
                await self._append_answer(question)
            except ssmlx.InputError as error:
                self.status.text = str(error)
            self._append_text("\n\n")
            self._answer = None
            self.stop_button.enabled = False
            self.ask_button.enabled = True

    async def _append_answer(self, question: str) -> None:
        self._answer = await asyncio.to_thread(
            self._reply_or_answer_alone, question, self.adapter.value
        )
        self.stop_button.enabled = True
        async for segment in self._answer:
            self._append_text(segment.text)
            speed = f"{segment.generation_tps:.0f} tokens/s"
            self.status.text = f"{speed}, {segment.tokens_per_call:.1f} tokens per call"

    def _reply_or_answer_alone(
        self, question: str, adapter: str
    ) -> ssmlx.Answer[ssmlx.GenerationResponse]:
        """Begin an answer, without waiting for its tokens."""
        assert self.engine is not None
        if adapter == CHAT:  # a conversation; the other adapters answer single questions
            return self.chat.reply(question)
        return self.engine.stream(question, adapter=adapter, max_tokens=MAX_TOKENS)

    def stop(self, widget: toga.Widget) -> None:
        """Stop the answer; its text so far stays."""
        if self._answer is not None:
            self._answer.cancel()

    async def on_exit(self) -> bool:
        """Wait until loading ends, a download included, and close the engine."""
        self._is_closing = True
        if self._loading is not None:
            await asyncio.wait([self._loading])
        if self.engine is not None:
            await asyncio.to_thread(self.engine.close)
        return True

    def _append_text(self, text: str) -> None:
        self.text.value += text
        self.text.scroll_to_bottom()


def main() -> ChatApp:
    return ChatApp("ssmlx Chat", "com.example.ssmlx-chat")
