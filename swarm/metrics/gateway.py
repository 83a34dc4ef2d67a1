"""Metrics of a gateway: its requests, their latency, and its load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from swarm.metrics.registry import ANSWER_BUCKETS_S, OTHER, STEP_BUCKETS_S, Instruments, Registry, label_or_other

ENDPOINTS = frozenset(
    {
        "/",
        "/api/chat",
        "/api/generate",
        "/api/ps",
        "/api/show",
        "/api/tags",
        "/api/version",
        "/detokenize",
        "/healthz",
        "/metrics",
        "/monitor",
        "/page",
        "/readyz",
        "/tokenize",
        "/tokenizer_info",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/models",
        "/v1/responses",
        "/v1/tokenize",
        "/v1/tokenizer_info",
    }
)
"""Paths by which requests are counted; a path below one of them counts there."""

MAX_DEPTH = max(path.count("/") for path in ENDPOINTS)

REFUSAL_REASONS = frozenset({"gateway", "key", "unauthorized"})
"""Why a request is refused: a limit of the whole gateway or of the API key, or a missing or wrong key."""


class GatewayMetrics:
    """Metrics of one gateway. Call the methods in its event loop's thread; any thread may read the metrics.

    Args:
        registry: where they are registered.
        models: names of the models that the gateway serves. Any other name is counted as `other`.
    """

    def __init__(self, registry: Registry, models: Iterable[str] = ()) -> None:
        self._models = frozenset(models)
        new = Instruments(registry, "swarm_gateway")
        answered = "Requests answered, by path, model and HTTP status."
        self._requests = new.counter("requests_total", answered, "endpoint", "model", "status")
        whole = "Time until a request is answered whole."
        self._seconds = new.histogram("request_seconds", whole, ANSWER_BUCKETS_S, "endpoint")
        self._refused = new.counter("refused_total", "Requests refused before any work, by reason.", "reason")
        self._running = new.gauge("running", "Requests that are computed now.")
        self._waiting = new.gauge("waiting", "Requests that wait for their turn.")
        self._streams = new.gauge("streams_open", "Answers that are being streamed.")
        first = "Time from a request to its first token, waiting included."
        self._first = new.histogram("first_token_seconds", first, ANSWER_BUCKETS_S, "model")
        between = "Time from one token of an answer to the next."
        self._token = new.histogram("token_seconds", between, STEP_BUCKETS_S, "model")
        self._prompt = new.counter("prompt_tokens_total", "Tokens of prompts.", "model")
        cached = "Tokens of prompts that were computed for earlier requests."
        self._cached = new.counter("cached_tokens_total", cached, "model")
        self._completion = new.counter("completion_tokens_total", "Tokens of answers.", "model")
        self._disconnects = new.counter("disconnects_total", "Clients that left before their answer was whole.")

    def track_admission(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Register the functions that count running and waiting requests; they are called when metrics are read."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def request_answered(self, endpoint: str, model: str | None, status: int, seconds: float) -> None:
        """Count a request that was answered completely or abandoned.

        Args:
            endpoint: its path.
            model: the model that it named; None if it named none.
            status: the HTTP status.
            seconds: time since it arrived.
        """
        endpoint = endpoint_label(endpoint)
        self._requests.labels(endpoint, self._model(model) if model is not None else "", str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def request_refused(self, reason: str) -> None:
        """Count a refused request; `reason` is one of `REFUSAL_REASONS`. `request_answered` counts it as well."""
        self._refused.labels(label_or_other(reason, REFUSAL_REASONS)).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """Record the time from a request to the first token of its answer."""
        self._first.labels(self._model(model)).observe(seconds)

    def next_token(self, model: str, seconds: float) -> None:
        """Record the time from the previous token of an answer to the next one."""
        self._token.labels(self._model(model)).observe(seconds)

    def tokens_used(self, model: str, prompt: int, completion: int, cached: int = 0) -> None:
        """Count a request's tokens, as in its `usage`."""
        label = self._model(model)
        self._prompt.labels(label).inc(prompt)
        self._completion.labels(label).inc(completion)
        self._cached.labels(label).inc(cached)

    def client_disconnected(self) -> None:
        """Count a client that disconnected before its answer was complete."""
        self._disconnects.inc()

    @contextmanager
    def track_stream(self) -> Iterator[None]:
        """Count an open stream for the duration of the context."""
        with self._streams.track_inprogress():
            yield

    def _model(self, name: str) -> str:
        return label_or_other(name, self._models)


def endpoint_label(path: str) -> str:
    """The label under which a path is counted: `/v1/models` for `/v1/models/demo`, `other` for unknown paths."""
    parts = path.split("/", MAX_DEPTH + 1)[: MAX_DEPTH + 1]
    beginnings = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((one for one in beginnings if one in ENDPOINTS), OTHER)
