"""What a server does, told to an observer, and counted."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram, Info

from swarm.data_structures import Span
from swarm.metrics.instruments import ROWS, STEP_SECONDS, TOKENS, error_label
from swarm.metrics.registry import Registry

KINDS = ("prefill", "decode", "forward", "backward")
"""Of work: prompts (and replays), single tokens, and whole sequences forth and back, of which nothing is kept."""


class ServerObserver:
    """Is told what a server does, and does nothing: what a server has that nobody measures.

    The methods are for any thread and must be quick: half of them are called for every token. Kinds of work are those
    of `KINDS`. Bytes are those of payloads (hidden states, gradients, adapters), not of headers and of encryption.
    """

    def received(self, message: str, size: int) -> None:
        """A message of this type came with a payload of so many bytes."""

    def started(self, waited: float) -> None:
        """A request begins to be computed, so many seconds after it came."""

    def iteration(self, portions: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Some tokens of several requests were computed together.

        Args:
            portions: kind, rows and tokens of each request.
            seconds: that it took.
        """

    def step(self, kind: str, seconds: float) -> None:
        """A request was computed whole, so many seconds after it came."""

    def sent(self, size: int) -> None:
        """A payload of so many bytes went to a client."""

    def pushed(self, size: int, arrived: bool) -> None:
        """A step's outputs were handed to the next server, or could not be."""

    def refused(self, code: str) -> None:
        """A request was answered with an error, see `swarm.errors`."""

    def session_opened(self) -> None:
        """A session was opened."""

    def session_closed(self, reason: str) -> None:
        """A session ended: it was "closed" by its client, has "expired", or was "ended" because the server leaves."""

    def sessions(self, count: int, cache_used: int, cache_capacity: int) -> None:
        """So many sessions have reserved so many tokens of the cache."""

    def adapters(self, count: int, size: int) -> None:
        """So many parts of clients' adapters are kept, of so many bytes in all."""

    def serving(self, model: str, revision: str, dtype: str, quantization: str, span: Span, throughput: float) -> None:
        """Blocks are loaded, for which so many blocks x tokens per second are announced."""

    def moved(self, urgent: bool, arrived: bool) -> None:
        """The server has moved to other blocks, to close a gap if urgent; or had to go back to those it had."""


class ServerMetrics(ServerObserver):
    """Counts of one server.

    Args:
        registry: where they are told.
    """

    def __init__(self, registry: Registry) -> None:
        tokens = Counter("swarm_server_tokens_total", "Tokens computed, by kind.", ["kind"], registry=registry)
        self._tokens = {kind: tokens.labels(kind) for kind in KINDS}
        self._queue = _seconds("queue", "Time that a request waited for its first iteration.", registry)
        self._rows = Histogram(
            "swarm_server_iteration_rows", "Rows that were computed together.", buckets=ROWS, registry=registry
        )
        self._batch = Histogram(
            "swarm_server_iteration_tokens", "Tokens that were computed together.", buckets=TOKENS, registry=registry
        )
        self._iterations = _seconds("iteration", "Time that an iteration took in the blocks.", registry)
        steps = Histogram(
            "swarm_server_step_seconds",
            "Time from a request to its outputs, by kind.",
            ["kind"],
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self._steps = {kind: steps.labels(kind) for kind in KINDS}
        self._messages = Counter(
            "swarm_server_messages_total", "Messages of peers, by type.", ["type"], registry=registry
        )
        self._received = Counter(
            "swarm_server_received_bytes_total", "Bytes of payloads that peers sent.", registry=registry
        )
        self._sent = Counter(
            "swarm_server_sent_bytes_total", "Bytes of payloads sent to clients and to next servers.", registry=registry
        )
        self._pushes = Counter(
            "swarm_server_pushes_total", "Outputs handed straight to the next server.", ["outcome"], registry=registry
        )
        self._errors = Counter(
            "swarm_server_errors_total", "Requests answered with an error, by its code.", ["code"], registry=registry
        )
        self._opened = Counter("swarm_server_sessions_opened_total", "Sessions opened.", registry=registry)
        self._closed = Counter(
            "swarm_server_sessions_closed_total", "Sessions ended, by reason.", ["reason"], registry=registry
        )
        self._open = _gauge("sessions_open", "Sessions that are open.", registry)
        self._cache_used = _gauge("cache_used_tokens", "Room in the attention cache that is reserved.", registry)
        self._cache_capacity = _gauge("cache_capacity_tokens", "Room in the attention cache.", registry)
        self._adapters = _gauge("adapters_kept", "Parts of clients' adapters that are kept, one a block.", registry)
        self._adapter_bytes = _gauge("adapter_bytes", "Bytes of clients' adapters.", registry)
        self._start = _gauge("span_start_block", "First block that is held.", registry)
        self._end = _gauge("span_end_block", "Block behind the last one that is held.", registry)
        self._throughput = _gauge("throughput_blocks_per_second", "Blocks a second for one token, announced.", registry)
        self._model = Info("swarm_server_model", "What is served, and how.", registry=registry)
        self._rebalances = Counter(
            "swarm_server_rebalances_total",
            "Moves to other blocks, by reason and outcome.",
            ["reason", "outcome"],
            registry=registry,
        )

    def received(self, message: str, size: int) -> None:
        self._messages.labels(message).inc()
        self._received.inc(size)

    def started(self, waited: float) -> None:
        self._queue.observe(waited)

    def iteration(self, portions: Sequence[tuple[str, int, int]], seconds: float) -> None:
        for kind, _, tokens in portions:
            self._tokens[kind].inc(tokens)
        self._rows.observe(sum(rows for _, rows, _ in portions))
        self._batch.observe(sum(tokens for _, _, tokens in portions))
        self._iterations.observe(seconds)

    def step(self, kind: str, seconds: float) -> None:
        self._steps[kind].observe(seconds)

    def sent(self, size: int) -> None:
        self._sent.inc(size)

    def pushed(self, size: int, arrived: bool) -> None:
        self._pushes.labels("sent" if arrived else "failed").inc()
        if arrived:
            self._sent.inc(size)

    def refused(self, code: str) -> None:
        self._errors.labels(error_label(code)).inc()

    def session_opened(self) -> None:
        self._opened.inc()

    def session_closed(self, reason: str) -> None:
        self._closed.labels(reason).inc()

    def sessions(self, count: int, cache_used: int, cache_capacity: int) -> None:
        self._open.set(count)
        self._cache_used.set(cache_used)
        self._cache_capacity.set(cache_capacity)

    def adapters(self, count: int, size: int) -> None:
        self._adapters.set(count)
        self._adapter_bytes.set(size)

    def serving(self, model: str, revision: str, dtype: str, quantization: str, span: Span, throughput: float) -> None:
        self._model.info({"model": model, "revision": revision, "dtype": dtype, "quantization": quantization})
        self._start.set(span.start)
        self._end.set(span.end)
        self._throughput.set(throughput)

    def moved(self, urgent: bool, arrived: bool) -> None:
        self._rebalances.labels("gap" if urgent else "balance", "moved" if arrived else "returned").inc()


def _seconds(name: str, meaning: str, registry: Registry) -> Histogram:
    return Histogram(f"swarm_server_{name}_seconds", meaning, buckets=STEP_SECONDS, registry=registry)


def _gauge(name: str, meaning: str, registry: Registry) -> Gauge:
    return Gauge(f"swarm_server_{name}", meaning, registry=registry)
