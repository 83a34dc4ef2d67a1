"""Messages of stateless requests: forward and backward passes over whole sequences. The server keeps nothing."""

from __future__ import annotations

from swarm.data_structures import WireFormat
from swarm.protocol.messages.fields import AdapterDigests, Count, Message, Milliseconds, Name, PerSequence


class ForwardRequest(Message, frozen=True):
    """Run blocks [start, end) over packed sequences, payload `[sum(counts), hidden]` in `format`.

    `offsets`: as in `StepLayout`.
    """

    revision: Name
    start: Count
    end: Count
    counts: PerSequence
    format: WireFormat
    dtype: Name
    reply_format: WireFormat
    offsets: PerSequence | None = None
    adapters: AdapterDigests | None = None


class ForwardReply(Message, frozen=True):
    """The outputs of a forward pass, payload `[sum(counts), hidden]` in `format`."""

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds


class BackwardRequest(Message, frozen=True):
    """Compute the gradients of a forward pass with respect to its inputs and adapters; the forward pass is repeated.

    Payload: the inputs `[sum(counts), hidden]` in `format`, then the gradients of the outputs, of the same shape, in
    `gradient_format`. The other fields are as in `ForwardRequest`.
    """

    revision: Name
    start: Count
    end: Count
    counts: PerSequence
    format: WireFormat
    dtype: Name
    gradient_format: WireFormat
    offsets: PerSequence | None = None
    adapters: AdapterDigests | None = None


class BackwardReply(Message, frozen=True):
    """The gradients of a forward pass.

    Payload: the gradients of the inputs `[sum(counts), hidden]` in `format` and `dtype`, then those of all adapters in
    float32, in the order of the adapters' bytes (`swarm.protocol.adapter_encoding`).
    """

    format: WireFormat
    dtype: Name
    compute_ms: Milliseconds
