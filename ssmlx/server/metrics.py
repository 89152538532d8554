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
        about = "Seconds to the first token, of answers that ended by themselves."
        self._prefill = Histogram("ssmlx_prefill_seconds", about, registry=kept)
        about = "Their tokens, and target calls, by kind."
        self._counts = Counter("ssmlx_tokens", about, ["kind"], registry=kept)

    def add(self, last: GenerationResponse) -> None:
        """Count an answer, of its last segment."""
        self._prefill.observe(last.prefill_seconds)
        for kind, count in (
            ("prompt", last.prompt_tokens),
            ("cached", last.cached_tokens),
            ("completion", last.generation_tokens),
            ("calls", last.target_calls),
        ):
            self._counts.labels(kind).inc(count)

    def told(self) -> tuple[bytes, int, None, str]:
        """Content, status, headers and type of a response."""
        return generate_latest(self._registry), 200, None, CONTENT_TYPE_PLAIN_0_0_4
