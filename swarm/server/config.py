"""What a person decides about a server. One frozen dataclass; everything else follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarm.data_structures import Span
from swarm.errors import InvalidOption, InvalidSpan
from swarm.metrics.endpoint import MetricsAddress
from swarm.server.throughput.throughput_option import ThroughputOption
from swarm.transport.p2p import P2PConfig

UPDATE_PERIOD_S = 30.0


@dataclass(frozen=True)
class BlocksOption:
    """The `--blocks` option: exactly one of the fields is set, or none for "auto".

    Attributes:
        span: these blocks.
        count: so many blocks, where the swarm is weakest.
    """

    span: Span | None = None
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> BlocksOption:
        """Read `auto`, `START:END` or `COUNT`. Raises `InvalidOption` or `InvalidSpan`."""
        if text == "auto":
            return cls()
        numbers = text.split(":")
        if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise InvalidOption(f"--blocks {text!r}: use auto, START:END (such as 0:8) or a number of blocks")
        if len(numbers) == 2:
            return cls(span=Span(int(numbers[0]), int(numbers[1])))
        if int(text) == 0:
            raise InvalidSpan("--blocks 0: a server needs at least one block")
        return cls(count=int(text))


@dataclass(frozen=True)
class ServerConfig:
    """Attributes:
    model: local folder or hub id; None for the demo model.
    revision: branch, tag or commit of a hub model.
    blocks: which blocks to hold.
    p2p: how to take part in the network.
    device: torch device, or "auto".
    dtype: "auto", "float32", "bfloat16" or "float16".
    throughput: what to announce: a number, or what was measured.
    throughput_cache: file of throughputs measured before; None for none.
    stay: never move to other blocks.
    name: shown to others beside the peer id.
    compile_in: folder of compiled code; None not to compile.
    quant: form of the weights: "none", "int8", "nf4" (on a CPU held as int4), or "auto" for what fits.
    cache_tokens: tokens that the attention cache can hold; None for the default.
    adapters: folders or hub ids of adapters that every client may use.
    adapter_memory: bytes of clients' adapters; None for the default.
    update_period: seconds between announcements.
    threads: torch threads; None for torch's own choice.
    metrics: where Prometheus may ask what this server does; None for nowhere, and nothing is counted.
    """

    model: str | None = None
    revision: str | None = None
    blocks: BlocksOption = field(default_factory=BlocksOption)
    p2p: P2PConfig = field(default_factory=P2PConfig)
    device: str = "auto"
    dtype: str = "auto"
    throughput: ThroughputOption = field(default_factory=ThroughputOption)
    throughput_cache: Path | None = None
    stay: bool = False
    name: str = ""
    compile_in: Path | None = None
    quant: str = "auto"
    cache_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    adapter_memory: int | None = None
    cache_dir: Path | None = None
    update_period: float = UPDATE_PERIOD_S
    threads: int | None = None
    metrics: MetricsAddress | None = None
