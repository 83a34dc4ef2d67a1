"""What the person who starts a server decides. `resolved_config` says what follows from it on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarm.data_structures import Span
from swarm.errors import InvalidOption, InvalidSpan
from swarm.metrics.endpoint import MetricsAddress
from swarm.server.flash_budget import FlashOption
from swarm.transport.p2p import P2PConfig

UPDATE_PERIOD_S = 30.0


@dataclass(frozen=True)
class BlocksOption:
    """The `--blocks` option: one of the fields is set, or none for "auto".

    Attributes:
        span: exactly these blocks.
        count: this many blocks, where the swarm is weakest.
    """

    span: Span | None = None
    count: int | None = None

    @property
    def requested(self) -> Span | int | None:
        """The span or the count, whichever is set; None for as many blocks as fit."""
        return self.span if self.span is not None else self.count

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
class ExitsOption:
    """The `--exits` option: blocks in front of which tokens may leave, where this server holds them.

    Attributes:
        blocks: ascending; None for all.
    """

    blocks: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> ExitsOption:
        """Read `all`, or numbers of blocks such as `4,8`. Raises `InvalidOption`."""
        if text == "all":
            return cls()
        numbers = [number.strip() for number in text.split(",")]
        if not all(number.isascii() and number.isdigit() and int(number) for number in numbers):
            raise InvalidOption(f"--exits {text!r}: use all, or numbers of blocks from 1 on (such as 4,8)")
        return cls(tuple(sorted(set(map(int, numbers)))))

    def require_inside(self, blocks: int) -> None:
        """Raise `InvalidOption` unless a model of so many blocks has all of them."""
        if self.blocks is not None and self.blocks[-1] >= blocks:
            raise InvalidOption(
                f"--exits {self.blocks[-1]}: the model has blocks 0:{blocks}, so its last exit is in front of block "
                f"{blocks - 1}"
            )

    def within(self, span: Span, blocks: int) -> tuple[int, ...]:
        """Those that a server of this span of a model of so many blocks can offer."""
        possible = range(span.start + 1, min(span.end, blocks - 1) + 1)
        return tuple(possible) if self.blocks is None else tuple(one for one in self.blocks if one in possible)


@dataclass(frozen=True)
class WeightsOption:
    """The `--weights-from` option and what goes with it: where weights come from, and who gets them from here.

    Attributes:
        source: "auto", "hub", "peers", or a folder. auto: from peers if the model is not a folder and the hub cannot be
            reached.
        digests: file of `swarm digest --for-peers`, which says what weights from peers must be.
        share: whether other peers get weights from this server; None to leave it to the swarm.
        share_rate: bytes/s that are sent to other peers at most; None for no bound.
    """

    source: str = "auto"
    digests: Path | None = None
    share: bool | None = None
    share_rate: int | None = None

    def __post_init__(self) -> None:
        if self.share_rate == 0:
            raise InvalidOption("--share-rate 0 would send nothing: use --share-weights off instead")

    @property
    def folder(self) -> str | None:
        """The folder that was given as the source; None if it is none."""
        return None if self.source in ("auto", "hub", "peers") else self.source

    def shares(self, is_private: bool) -> bool:
        """Whether this server shares weights: in a private swarm unless told otherwise, in an open one if told to.

        Some models' licences forbid to pass them on to strangers.
        """
        return is_private if self.share is None else self.share


MAX_THROUGHPUT = 1e9
"""Blocks x tokens per second that an announcement may claim."""


def parse_throughput(text: str) -> float | None:
    """Read `--throughput`: `auto`, which is None, or blocks x tokens per second. Raises `InvalidOption`."""
    if text == "auto":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < MAX_THROUGHPUT:
        raise InvalidOption(f"--throughput {text!r}: use auto or a number of blocks per second above 0")
    return rate


@dataclass(frozen=True)
class ServerConfig:
    """The options of one server, as given on the command line.

    Attributes:
        model: local folder or hub id; None for the demo model.
        revision: branch, tag or commit of a hub model.
        blocks: which blocks to hold.
        p2p: how to take part in the network.
        device: torch device, or "auto".
        dtype: "auto", "float32", "bfloat16" or "float16".
        throughput: blocks x tokens per second to announce; None to measure them.
        stay: never move to other blocks.
        name: shown to others beside the peer id.
        quant: format of the weights: "none", "packed" (as the checkpoint has them), "int8", "nf4" (int4 on a CPU), or
            "auto".
        cache_tokens: tokens that the attention cache can hold; None for the default.
        adapters: folders or hub ids of adapters that every client may use.
        adapter_memory: bytes for clients' adapters; None for the default.
        request_memory: bytes for requests on their way; None for the default.
        cache_dir: where files from the hub are kept; None for the hub's own folder.
        weights: where weights come from, and who gets them from here.
        update_period: seconds between announcements.
        threads: torch threads; None for torch's own choice.
        metrics: address of the Prometheus endpoint; None for no endpoint and no counting.
        flash: whether weights stay on flash, and how much memory they get.
        flash_exact: never select neurons, so that results are exact.
        exits: where tokens may leave inside the span; None for nowhere.
        exits_from: folder of lenses and classifiers for that (`model.save_exits`).
        vouchers: owners of points whose word counts here, even if nothing is owed to them (docs/trust.md).
    """

    model: str | None = None
    revision: str | None = None
    blocks: BlocksOption = field(default_factory=BlocksOption)
    p2p: P2PConfig = field(default_factory=P2PConfig)
    device: str = "auto"
    dtype: str = "auto"
    throughput: float | None = None
    stay: bool = False
    name: str = ""
    quant: str = "auto"
    cache_tokens: int | None = None
    adapters: tuple[str, ...] = ()
    adapter_memory: int | None = None
    request_memory: int | None = None
    cache_dir: Path | None = None
    update_period: float = UPDATE_PERIOD_S
    threads: int | None = None
    metrics: MetricsAddress | None = None
    flash: FlashOption = field(default_factory=FlashOption)
    flash_exact: bool = False
    exits: ExitsOption | None = None
    exits_from: Path | None = None
    weights: WeightsOption = field(default_factory=WeightsOption)
    vouchers: tuple[str, ...] = ()

    @property
    def may_move(self) -> bool:
        """Whether the server may move to other blocks. One that was given a span keeps it."""
        return not self.stay and self.blocks.span is None
