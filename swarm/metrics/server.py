"""Metrics of a server, and the observer through which its components report what they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.data_structures import FlashUse, Span
from swarm.metrics.registry import SEQUENCE_BUCKETS, STEP_BUCKETS_S, TOKEN_BUCKETS, Instruments, Registry, error_label

REQUEST_KINDS = ("prefill", "decode", "forward", "backward")
"""Kinds of requests: prompts (and replays), single tokens, and forward and backward passes without a session."""


class ServerObserver:
    """Receives reports of what a server does, and counts it.

    The methods may be called from any thread and must be fast: half of them are called for every token. Kinds are
    those of `REQUEST_KINDS`. Bytes are those of payloads (hidden states, gradients, adapters), without headers and
    encryption.

    Args:
        registry: where the metrics are registered; None to count nothing.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        new = Instruments(registry, "swarm_server")
        tokens = new.counter("tokens_total", "Tokens computed, by kind.", "kind")
        self._tokens = {kind: tokens.labels(kind) for kind in REQUEST_KINDS}
        waited = "Time that a request waited for its first iteration."
        self._queue = new.histogram("queue_seconds", waited, STEP_BUCKETS_S)
        together = "Sequences that were computed together."
        self._sequences = new.histogram("iteration_sequences", together, SEQUENCE_BUCKETS)
        self._batch = new.histogram("iteration_tokens", "Tokens that were computed together.", TOKEN_BUCKETS)
        took = "Time that an iteration took in the blocks."
        self._iterations = new.histogram("iteration_seconds", took, STEP_BUCKETS_S)
        steps = new.histogram("step_seconds", "Time from a request to its outputs, by kind.", STEP_BUCKETS_S, "kind")
        self._steps = {kind: steps.labels(kind) for kind in REQUEST_KINDS}
        self._received = new.counter("received_bytes_total", "Bytes of payloads that peers sent.")
        self._sent = new.counter("sent_bytes_total", "Bytes of payloads sent to clients and to next servers.")
        self._pushes = new.counter("pushes_total", "Outputs handed straight to the next server.", "outcome")
        left = "Tokens that left the span early, by the block in front of which they did."
        self._exits = new.counter("exits_total", left, "block")
        self._errors = new.counter("errors_total", "Requests answered with an error, by its code.", "code")
        self._opened = new.counter("sessions_opened_total", "Sessions opened.")
        self._closed = new.counter("sessions_closed_total", "Sessions ended, by reason.", "reason")
        self._points = new.counter("points_total", "Token-blocks for which clients' owners have signed.")
        self._open = new.gauge("sessions_open", "Sessions that are open.")
        self._cache_used = new.gauge("cache_used_tokens", "Tokens reserved in the attention cache.")
        self._cache_capacity = new.gauge("cache_capacity_tokens", "Tokens that the attention cache can hold.")
        self._parked = new.gauge("parked_tokens", "Tokens kept in the attention cache of sessions that ended.")
        begun = "Tokens with which clients wanted new sessions to begin, by whether they were still there."
        self._prefixes = new.counter("prefix_tokens_total", begun, "outcome")
        self._adapter_bytes = new.gauge("adapter_bytes", "Bytes of clients' adapters.")
        self._memory = new.gauge("memory_bytes", "Memory charged for requests.")
        self._memory_capacity = new.gauge("memory_capacity_bytes", "Memory that requests can have.")
        self._memory_refusals = new.counter("memory_refusals_total", "Streams and requests without memory.")
        self._start = new.gauge("span_start_block", "First block that is held.")
        self._end = new.gauge("span_end_block", "Block behind the last one that is held.")
        self._throughput = new.gauge("throughput_blocks_per_second", "Blocks a second for one token, announced.")
        self._model = new.info("model", "What is served, and how.")
        self._rebalances = new.counter(
            "rebalances_total", "Moves to other blocks, by reason and outcome.", "reason", "outcome"
        )
        flash = Instruments(registry, "swarm_server_flash")
        self._flash = {
            "read_bytes": flash.counter("read_bytes_total", "Bytes read from flash."),
            "reads": flash.counter("reads_total", "Reads from flash."),
            "wait_seconds": flash.counter("wait_seconds_total", "Time that computing stood still for the drive."),
            "needed": flash.counter("needed_records_total", "Experts and neurons that computing needed."),
            "hits": flash.counter("hit_records_total", "Needed experts and neurons that were in memory."),
            "selected": flash.counter("selected_neurons_total", "Neurons selected, summed over tokens."),
            "selectable": flash.counter("selectable_neurons_total", "Neurons that could have been selected."),
        }

    def message_received(self, size: int) -> None:
        """A message arrived with a payload of so many bytes."""
        self._received.inc(size)

    def request_started(self, waited: float) -> None:
        """A request's computation began, so many seconds after it arrived."""
        self._queue.observe(waited)

    def iteration_finished(self, slices: Sequence[tuple[str, int, int]], seconds: float) -> None:
        """Some tokens of several requests were computed together.

        Args:
            slices: kind, number of sequences and number of tokens of each request.
            seconds: duration of the iteration.
        """
        all_sequences = all_tokens = 0
        for kind, sequences, tokens in slices:
            self._tokens[kind].inc(tokens)
            all_sequences, all_tokens = all_sequences + sequences, all_tokens + tokens
        self._sequences.observe(all_sequences)
        self._batch.observe(all_tokens)
        self._iterations.observe(seconds)

    def request_finished(self, kind: str, seconds: float) -> None:
        """A request's computation finished, so many seconds after it arrived."""
        self._steps[kind].observe(seconds)

    def payload_sent(self, size: int) -> None:
        """A payload of so many bytes was sent to a client."""
        self._sent.inc(size)

    def output_pushed(self, size: int, arrived: bool) -> None:
        """A step's output was pushed to the next server, or could not be."""
        self._pushes.labels("sent" if arrived else "failed").inc()
        if arrived:
            self._sent.inc(size)

    def tokens_left(self, blocks: Iterable[int]) -> None:
        """Tokens left the span early, in front of these blocks."""
        for block in blocks:
            self._exits.labels(str(block)).inc()

    def request_refused(self, code: str) -> None:
        """A request was answered with an error; for the codes see `swarm.errors`."""
        self._errors.labels(error_label(code)).inc()

    def session_opened(self) -> None:
        """A session was opened."""
        self._opened.inc()

    def session_closed(self, reason: str) -> None:
        """A session ended: "closed" by its client, "expired", "asked_to_leave", or "ended" as the server leaves."""
        self._closed.labels(reason).inc()

    def points_signed(self, token_blocks: int) -> None:
        """The owner of a client's points has signed for so much more."""
        self._points.inc(token_blocks)

    def session_totals(self, count: int, cache_used: int, cache_capacity: int) -> None:
        """The number of sessions, or the cache tokens that they reserve, changed."""
        self._open.set(count)
        self._cache_used.set(cache_used)
        self._cache_capacity.set(cache_capacity)

    def parked_total(self, tokens: int) -> None:
        """The cache tokens changed that are kept of sessions that have ended."""
        self._parked.set(tokens)

    def prefix_taken(self, asked: int, begun: int) -> None:
        """A session begins with `begun` of the positions of an earlier one, of which its client asked for `asked`."""
        self._prefixes.labels("kept").inc(begun)
        self._prefixes.labels("gone").inc(asked - begun)

    def adapter_total(self, size: int) -> None:
        """The total size of the stored parts of clients' adapters changed."""
        self._adapter_bytes.set(size)

    def memory_totals(self, charged: int, capacity: int) -> None:
        """What requests on their way take of the bytes that there are for them."""
        self._memory.set(charged)
        self._memory_capacity.set(capacity)

    def memory_refused(self) -> None:
        """A stream or a request found no memory."""
        self._memory_refusals.inc()

    def span_loaded(self, model: str, revision: str, dtype: str, quantization: str, span: Span) -> None:
        """A span was loaded."""
        self._model.info({"model": model, "revision": revision, "dtype": dtype, "quantization": quantization})
        self._start.set(span.start)
        self._end.set(span.end)

    def throughput_announced(self, throughput: float) -> None:
        """The server announces that it computes so many blocks x tokens per second."""
        self._throughput.set(throughput)

    def flash_used(self, use: FlashUse) -> None:
        """Blocks on flash read this since the last report."""
        for name, counter in self._flash.items():
            counter.inc(getattr(use, name))

    def span_moved(self, urgent: bool, arrived: bool) -> None:
        """The server moved to other blocks (`urgent`: to close a gap), or had to return to its previous ones."""
        self._rebalances.labels("gap" if urgent else "balance", "moved" if arrived else "returned").inc()
