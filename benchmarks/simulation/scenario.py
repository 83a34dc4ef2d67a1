"""What happens in a simulation. Times are seconds, throughputs blocks/s or tokens/s as in `swarm.data_structures`."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.server.placement.move_decision import MovePolicy


@dataclass(frozen=True)
class Machines:
    """Distribution from which the properties of each server are drawn.

    Attributes:
        throughput: blocks/s of the median server.
        spread: standard deviation of the logarithm of the throughput; 0 for equal servers.
        blocks: fewest and most blocks that a server holds; all numbers in this range are equally likely.
        pinned: fraction of the servers that never move, as if started with `--blocks`.
        disk: bytes/s at which the median server loads weights; varies with half the spread.
    """

    throughput: float = 100.0
    spread: float = 0.5
    blocks: tuple[int, int] = (4, 12)
    pinned: float = 0.0
    disk: float = 1e9


@dataclass(frozen=True)
class Join:
    """`servers` servers join at random times within `over` seconds from `at`."""

    servers: int
    at: float = 0.0
    over: float = 0.0


@dataclass(frozen=True)
class Leave:
    """All servers that hold one of the `blocks` [first, end) leave at once; `silently` as after a power cut."""

    at: float
    blocks: tuple[int, int]
    silently: bool = False


@dataclass(frozen=True)
class Churn:
    """From `at` to `until`, the fraction `hourly` of the servers leaves each hour, and another server joins for each.

    `silently` is the fraction of the leaving servers that leave without an announcement.
    """

    at: float
    until: float
    hourly: float
    silently: float = 0.0


@dataclass(frozen=True)
class Lie:
    """A server joins that announces `announced` blocks/s, is no faster than others, and never moves."""

    at: float
    announced: float = 1e9


Event = Join | Leave | Churn | Lie


@dataclass(frozen=True)
class Scenario:
    """A swarm and what happens to it.

    Attributes:
        blocks: number of blocks of the model.
        duration: simulated time.
        steady_from: beginning of the steady state, for the statistics.
        block_bytes: size of one block's weights; with the disk's speed it determines how long a server loads.
        update_period: time between two announcements, and between two checks for moves, of a server.
        record_periods: an announcement that is not renewed remains visible for this many update periods.
        visible_every: a change becomes visible to others at the next multiple of this.
        sample_every: time between two samples.
    """

    description: str
    blocks: int
    duration: float
    events: tuple[Event, ...]
    machines: Machines = Machines()
    steady_from: float = 0.0
    block_bytes: float = 8e8
    update_period: float = 30.0
    record_periods: float = 2.5
    visible_every: float = 1.0
    sample_every: float = 10.0

    @property
    def policy(self) -> MovePolicy:
        """The policy by which the servers decide."""
        return MovePolicy(check_period=self.update_period)


SCENARIOS = {
    "steady": Scenario(
        "1,000 unequal servers over 80 blocks; once all have joined, nothing happens.",
        blocks=80,
        duration=7200,
        steady_from=1800,
        machines=Machines(spread=0.7, blocks=(2, 12)),
        events=(Join(1000, over=120),),
    ),
    "stretch-leaves": Scenario(
        "After an hour all servers that hold one of the blocks 30:38 leave at once.",
        blocks=80,
        duration=7200,
        steady_from=5400,
        events=(Join(600, over=120), Leave(3600, (30, 38))),
    ),
    "churn": Scenario(
        "A tenth of 500 servers leaves every hour, half of them without notice; as many join.",
        blocks=80,
        duration=14400,
        steady_from=1800,
        events=(Join(500, over=120), Churn(1200, 14400, hourly=0.1, silently=0.5)),
    ),
    "unequal": Scenario(
        "500 servers, the fastest percent 100 times as fast as the slowest; a fifth never moves.",
        blocks=80,
        duration=7200,
        steady_from=1800,
        machines=Machines(spread=1.0, blocks=(2, 20), pinned=0.2),
        events=(Join(500, over=120),),
    ),
    "growth": Scenario(
        "400 servers join an empty swarm within an hour.",
        blocks=80,
        duration=7200,
        steady_from=5400,
        events=(Join(400, over=3600),),
    ),
    "large": Scenario(
        "10,000 servers over 80 blocks; a twentieth leaves every hour, as many join.",
        blocks=80,
        duration=3600,
        steady_from=1800,
        visible_every=5,
        sample_every=30,
        machines=Machines(spread=0.7, blocks=(2, 12)),
        events=(Join(10000, over=600), Churn(1200, 3600, hourly=0.05, silently=0.3)),
    ),
    "liar": Scenario(
        "After half an hour a server among 200 announces a billion blocks/s.",
        blocks=40,
        duration=7200,
        steady_from=3600,
        events=(Join(200, over=120), Lie(1800), Churn(1800, 7200, hourly=0.1)),
    ),
}
