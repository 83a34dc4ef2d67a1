"""What a gateway is asked and how soon it answers, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from swarm.metrics.instruments import ANSWER_SECONDS, OTHER, STEP_SECONDS, bounded
from swarm.metrics.registry import Registry

ENDPOINTS = frozenset(
    {
        "/",
        "/healthz",
        "/metrics",
        "/monitor",
        "/page",
        "/readyz",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    }
)
"""Paths by which requests are counted; a path below one of them counts there."""

DEPTH = max(path.count("/") for path in ENDPOINTS)

REFUSALS = frozenset({"gateway", "key", "unauthorized"})
"""Why a request is refused: a limit of the whole gateway or of its key, or a key that is none."""


class GatewayMetrics:
    """Counts of one gateway. The methods are for its loop's thread; the counts may be told from any.

    Args:
        registry: where they are told.
        models: names that the gateway serves. Whatever else a request names is counted as `other`.
    """

    def __init__(self, registry: Registry, models: Iterable[str] = ()) -> None:
        self._models = frozenset(models)
        self._requests = Counter(
            "swarm_gateway_requests_total",
            "Requests answered, by path, model and HTTP status.",
            ["endpoint", "model", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "swarm_gateway_request_seconds",
            "Time until a request is answered whole.",
            ["endpoint"],
            buckets=ANSWER_SECONDS,
            registry=registry,
        )
        self._refused = Counter(
            "swarm_gateway_refused_total", "Requests refused before any work, by reason.", ["reason"], registry=registry
        )
        self._running = Gauge("swarm_gateway_running", "Requests that are computed now.", registry=registry)
        self._waiting = Gauge("swarm_gateway_waiting", "Requests that wait for their turn.", registry=registry)
        self._streams = Gauge("swarm_gateway_streams_open", "Answers that are being streamed.", registry=registry)
        self._first = Histogram(
            "swarm_gateway_first_token_seconds",
            "Time from a request to its first token, waiting included.",
            ["model"],
            buckets=ANSWER_SECONDS,
            registry=registry,
        )
        self._token = Histogram(
            "swarm_gateway_token_seconds",
            "Time from one token of an answer to the next.",
            ["model"],
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self._prompt = Counter("swarm_gateway_prompt_tokens_total", "Tokens of prompts.", ["model"], registry=registry)
        self._completion = Counter(
            "swarm_gateway_completion_tokens_total", "Tokens of answers.", ["model"], registry=registry
        )
        self._disconnects = Counter(
            "swarm_gateway_disconnects_total", "Clients that left before their answer was whole.", registry=registry
        )
        self._received = Counter("swarm_gateway_received_bytes_total", "Bytes of request bodies.", registry=registry)
        self._sent = Counter("swarm_gateway_sent_bytes_total", "Bytes of answers' bodies.", registry=registry)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Ask these for the numbers of running and waiting requests, whenever somebody wants to know."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def answered(self, endpoint: str, model: str | None, status: int, seconds: float) -> None:
        """A request has been answered whole, or given up.

        Args:
            endpoint: its path.
            model: that it named; None if it named none.
            status: of HTTP.
            seconds: since it came.
        """
        endpoint = endpoint_label(endpoint)
        self._requests.labels(endpoint, self._model(model) if model is not None else "", str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was refused; one of `REFUSALS`. It is `answered` as well."""
        self._refused.labels(bounded(reason, REFUSALS)).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """The first token of an answer is there, so many seconds after its request."""
        self._first.labels(self._model(model)).observe(seconds)

    def next_token(self, model: str, seconds: float) -> None:
        """A further token is there, so many seconds after the one before."""
        self._token.labels(self._model(model)).observe(seconds)

    def used(self, model: str, prompt: int, completion: int) -> None:
        """A request took so many tokens, as its `usage` says."""
        label = self._model(model)
        self._prompt.labels(label).inc(prompt)
        self._completion.labels(label).inc(completion)

    def disconnected(self) -> None:
        """A client left before its answer was whole."""
        self._disconnects.inc()

    def received(self, size: int) -> None:
        """So many bytes of a request's body came."""
        self._received.inc(size)

    def sent(self, size: int) -> None:
        """So many bytes of an answer's body went."""
        self._sent.inc(size)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """While an answer is streamed."""
        with self._streams.track_inprogress():
            yield

    def _model(self, name: str) -> str:
        return bounded(name, self._models)


def endpoint_label(path: str) -> str:
    """By which path a request is counted: `/v1/models/demo` as `/v1/models`, what is unknown as `other`."""
    parts = path.split("/", DEPTH + 1)[: DEPTH + 1]
    beginnings = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((one for one in beginnings if one in ENDPOINTS), OTHER)
