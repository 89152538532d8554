"""Counts for Prometheus: numbers alone, of all users together."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ..api import GenerationResponse


class Metrics:
    """One server's counts."""

    def __init__(self) -> None:
        kept = self._registry = CollectorRegistry()
        about = "Requests that were refused, or failed, by status."
        self.refused = Counter("ssmlx_refused", about, ["status"], registry=kept)
        self.waiting = Gauge("ssmlx_waiting", "Requests that wait.", registry=kept)
        self.open = Gauge("ssmlx_open", "Answers that are being written.", registry=kept)
        about = "Answers that ended by themselves."
        self._answers = Counter("ssmlx_answers", about, registry=kept)
        self._calls = Counter("ssmlx_target_calls", "Forward passes for them.", registry=kept)
        self._tokens = Counter("ssmlx_tokens", "Their tokens, by kind.", ["kind"], registry=kept)
        about = "Seconds from an answer's beginning to its first token."
        self._prefill = Histogram("ssmlx_prefill_seconds", about, registry=kept)

    def add(self, last: GenerationResponse) -> None:
        """Count an answer, of its last segment."""
        self._answers.inc()
        self._calls.inc(last.target_calls)
        self._prefill.observe(last.prefill_seconds)
        self._tokens.labels("prompt").inc(last.prompt_tokens)
        self._tokens.labels("cached").inc(last.cached_tokens)
        self._tokens.labels("completion").inc(last.generation_tokens)
        self._tokens.labels("accepted").inc(last.generation_tokens - last.target_calls)

    def told(self) -> tuple[bytes, int, None, str]:
        """Content, status, headers and type of a response."""
        return generate_latest(self._registry), 200, None, CONTENT_TYPE_PLAIN_0_0_4
