"""Metrics of a server, and the observer interface through which its components report what they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Gauge, Histogram, Info

from swarm.data_structures import FlashUse, Span
from swarm.metrics.registry import SEQUENCE_BUCKETS, STEP_BUCKETS_S, TOKEN_BUCKETS, Registry, error_label

REQUEST_KINDS = ("prefill", "decode", "forward", "backward")
"""Kinds of requests: prompts (and replays), single tokens, and forward and backward passes without a session."""


class ServerObserver:
    """Receives reports of what a server does. This base class ignores them: it is for servers without metrics.

    The methods may be called from any thread and must be fast: half of them are called for every token. Kinds are
    those of `REQUEST_KINDS`. Bytes are those of payloads (hidden states, gradients, adapters), without headers and
    encryption.
    """

    def message_received(self, size: int) -> None:
        """A message arrived with a payload of so many bytes."""

    def request_started(self, waited: float) -> None:
        """A request's computation began, so many seconds after it arrived."""

    def iteration_finished(self, slices: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Some tokens of several requests were computed together.

        Args:
            slices: kind, number of sequences and number of tokens of each request.
            seconds: duration of the iteration.
        """

    def request_finished(self, kind: str, seconds: float) -> None:
        """A request's computation finished, so many seconds after it arrived."""

    def payload_sent(self, size: int) -> None:
        """A payload of so many bytes was sent to a client."""

    def output_pushed(self, size: int, arrived: bool) -> None:
        """A step's output was pushed to the next server, or could not be."""

    def tokens_left(self, blocks: Iterable[int]) -> None:
        """Tokens left the span early, in front of these blocks."""

    def request_refused(self, code: str) -> None:
        """A request was answered with an error; for the codes see `swarm.errors`."""

    def session_opened(self) -> None:
        """A session was opened."""

    def session_closed(self, reason: str) -> None:
        """A session ended: "closed" by its client, "expired", "asked_to_leave", or "ended" as the server leaves."""

    def points_signed(self, token_blocks: int) -> None:
        """The owner of a client's points has signed for so much more."""

    def session_totals(self, count: int, cache_used: int, cache_capacity: int) -> None:
        """The number of sessions, or the cache tokens that they reserve, changed."""

    def parked_total(self, tokens: int) -> None:
        """The cache tokens changed that are kept of sessions that have ended."""

    def prefix_taken(self, asked: int, begun: int) -> None:
        """A session begins with `begun` of the positions of an earlier one, of which its client asked for `asked`."""

    def adapter_total(self, size: int) -> None:
        """The total size of the stored parts of clients' adapters changed."""

    def memory_totals(self, charged: int, capacity: int) -> None:
        """What requests on their way take of the bytes that there are for them."""

    def memory_refused(self) -> None:
        """A stream or a request found no memory."""

    def span_loaded(self, model: str, revision: str, dtype: str, quantization: str, span: Span) -> None:
        """A span was loaded."""

    def throughput_announced(self, throughput: float) -> None:
        """The server announces that it computes so many blocks x tokens per second."""

    def flash_used(self, use: FlashUse) -> None:
        """Blocks on flash read this since the last report."""

    def span_moved(self, urgent: bool, arrived: bool) -> None:
        """The server moved to other blocks (`urgent`: to close a gap), or had to return to its previous ones."""


class ServerMetrics(ServerObserver):
    """Metrics of one server.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: Registry) -> None:
        tokens = Counter("swarm_server_tokens_total", "Tokens computed, by kind.", ["kind"], registry=registry)
        self._tokens = {kind: tokens.labels(kind) for kind in REQUEST_KINDS}
        self._queue = _seconds("queue", "Time that a request waited for its first iteration.", registry)
        self._sequences = Histogram(
            "swarm_server_iteration_sequences",
            "Sequences that were computed together.",
            buckets=SEQUENCE_BUCKETS,
            registry=registry,
        )
        self._batch = Histogram(
            "swarm_server_iteration_tokens",
            "Tokens that were computed together.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self._iterations = _seconds("iteration", "Time that an iteration took in the blocks.", registry)
        steps = Histogram(
            "swarm_server_step_seconds",
            "Time from a request to its outputs, by kind.",
            ["kind"],
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self._steps = {kind: steps.labels(kind) for kind in REQUEST_KINDS}
        self._received = Counter(
            "swarm_server_received_bytes_total", "Bytes of payloads that peers sent.", registry=registry
        )
        self._sent = Counter(
            "swarm_server_sent_bytes_total", "Bytes of payloads sent to clients and to next servers.", registry=registry
        )
        self._pushes = Counter(
            "swarm_server_pushes_total", "Outputs handed straight to the next server.", ["outcome"], registry=registry
        )
        self._exits = Counter(
            "swarm_server_exits_total",
            "Tokens that left the span early, by the block in front of which they did.",
            ["block"],
            registry=registry,
        )
        self._errors = Counter(
            "swarm_server_errors_total", "Requests answered with an error, by its code.", ["code"], registry=registry
        )
        self._opened = Counter("swarm_server_sessions_opened_total", "Sessions opened.", registry=registry)
        self._closed = Counter(
            "swarm_server_sessions_closed_total", "Sessions ended, by reason.", ["reason"], registry=registry
        )
        self._points = Counter(
            "swarm_server_points_total", "Token-blocks for which clients' owners have signed.", registry=registry
        )
        self._open = _gauge("sessions_open", "Sessions that are open.", registry)
        self._cache_used = _gauge("cache_used_tokens", "Tokens reserved in the attention cache.", registry)
        self._cache_capacity = _gauge("cache_capacity_tokens", "Tokens that the attention cache can hold.", registry)
        self._parked = _gauge("parked_tokens", "Tokens kept in the attention cache of sessions that ended.", registry)
        self._prefixes = Counter(
            "swarm_server_prefix_tokens_total",
            "Tokens with which clients wanted new sessions to begin, by whether they were still there.",
            ["outcome"],
            registry=registry,
        )
        self._adapter_bytes = _gauge("adapter_bytes", "Bytes of clients' adapters.", registry)
        self._memory = _gauge("memory_bytes", "Memory charged for requests.", registry)
        self._memory_capacity = _gauge("memory_capacity_bytes", "Memory that requests can have.", registry)
        self._memory_refusals = Counter(
            "swarm_server_memory_refusals_total", "Streams and requests without memory.", registry=registry
        )
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
        self._flash = FlashMetrics(registry)

    def message_received(self, size: int) -> None:
        self._received.inc(size)

    def request_started(self, waited: float) -> None:
        self._queue.observe(waited)

    def iteration_finished(self, slices: Sequence[tuple[str, int, int]], seconds: float) -> None:
        for kind, _, tokens in slices:
            self._tokens[kind].inc(tokens)
        self._sequences.observe(sum(sequences for _, sequences, _ in slices))
        self._batch.observe(sum(tokens for _, _, tokens in slices))
        self._iterations.observe(seconds)

    def request_finished(self, kind: str, seconds: float) -> None:
        self._steps[kind].observe(seconds)

    def payload_sent(self, size: int) -> None:
        self._sent.inc(size)

    def output_pushed(self, size: int, arrived: bool) -> None:
        self._pushes.labels("sent" if arrived else "failed").inc()
        if arrived:
            self._sent.inc(size)

    def tokens_left(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._exits.labels(str(block)).inc()

    def request_refused(self, code: str) -> None:
        self._errors.labels(error_label(code)).inc()

    def session_opened(self) -> None:
        self._opened.inc()

    def session_closed(self, reason: str) -> None:
        self._closed.labels(reason).inc()

    def points_signed(self, token_blocks: int) -> None:
        self._points.inc(token_blocks)

    def parked_total(self, tokens: int) -> None:
        self._parked.set(tokens)

    def prefix_taken(self, asked: int, begun: int) -> None:
        self._prefixes.labels("kept").inc(begun)
        self._prefixes.labels("gone").inc(asked - begun)

    def session_totals(self, count: int, cache_used: int, cache_capacity: int) -> None:
        self._open.set(count)
        self._cache_used.set(cache_used)
        self._cache_capacity.set(cache_capacity)

    def adapter_total(self, size: int) -> None:
        self._adapter_bytes.set(size)

    def memory_totals(self, charged: int, capacity: int) -> None:
        self._memory.set(charged)
        self._memory_capacity.set(capacity)

    def memory_refused(self) -> None:
        self._memory_refusals.inc()

    def span_loaded(self, model: str, revision: str, dtype: str, quantization: str, span: Span) -> None:
        self._model.info({"model": model, "revision": revision, "dtype": dtype, "quantization": quantization})
        self._start.set(span.start)
        self._end.set(span.end)

    def throughput_announced(self, throughput: float) -> None:
        self._throughput.set(throughput)

    def span_moved(self, urgent: bool, arrived: bool) -> None:
        self._rebalances.labels("gap" if urgent else "balance", "moved" if arrived else "returned").inc()

    def flash_used(self, use: FlashUse) -> None:
        self._flash.count(use)


class FlashMetrics:
    """Metrics of blocks on flash.

    Args:
        registry: where they are registered.
    """

    def __init__(self, registry: Registry) -> None:
        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"swarm_server_flash_{name}_total", meaning, registry=registry)

        self._counters = {
            "read_bytes": counter("read_bytes", "Bytes read from flash."),
            "reads": counter("reads", "Reads from flash."),
            "wait_seconds": counter("wait_seconds", "Time that computing stood still for the drive."),
            "needed": counter("needed_records", "Experts and neurons that computing needed."),
            "hits": counter("hit_records", "Needed experts and neurons that were in memory."),
            "selected": counter("selected_neurons", "Neurons selected, summed over tokens."),
            "selectable": counter("selectable_neurons", "Neurons that could have been selected."),
        }

    def count(self, use: FlashUse) -> None:
        """Add what was read and selected."""
        for name, counter in self._counters.items():
            counter.inc(getattr(use, name))


def _seconds(name: str, meaning: str, registry: Registry) -> Histogram:
    return Histogram(f"swarm_server_{name}_seconds", meaning, buckets=STEP_BUCKETS_S, registry=registry)


def _gauge(name: str, meaning: str, registry: Registry) -> Gauge:
    return Gauge(f"swarm_server_{name}", meaning, registry=registry)
