"""Counts for Prometheus: numbers alone, of all users together."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..api import GenerationResponse

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One server's counts."""

    def __init__(self) -> None:
        self._registry = kept = CollectorRegistry()
        self.requests = Counter(
            "ssmlx_requests", "Requests, by route and status.", ["route", "status"], registry=kept
        )
        self.open = Gauge("ssmlx_open_answers", "Answers that are being written.", registry=kept)
        self.waiting = Gauge("ssmlx_waiting_requests", "Requests that wait.", registry=kept)
        self._tokens = Counter(
            "ssmlx_tokens", "Tokens of answers that ended, by kind.", ["kind"], registry=kept
        )
        self._calls = Counter("ssmlx_target_calls", "Forward passes for them.", registry=kept)
        self.first_token = Histogram(
            "ssmlx_first_token_seconds", "Until an answer's first token, once it was let in.",
            buckets=_SECONDS, registry=kept,
        )  # fmt: skip

    def add(self, last: GenerationResponse) -> None:
        """Count an answer by its last segment."""
        for kind, count in (
            ("prompt", last.prompt_tokens),
            ("cached", last.cached_tokens),
            ("completion", last.generation_tokens),
            ("accepted", last.generation_tokens - last.target_calls),
        ):
            self._tokens.labels(kind).inc(count)
        self._calls.inc(last.target_calls)

    def text(self) -> bytes:
        """In Prometheus's own format."""
        return generate_latest(self._registry)
