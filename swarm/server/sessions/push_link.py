"""Sending a step's outputs straight to the next server of the route, and how often clients may have others dialed.

A pushed step is an ordinary step that does not come from the client. Pushing is only an optimisation: the client gets
the outputs as well and delivers them itself where a push failed. A push may therefore be lost.

A client may name any peer id. To reach one that it has never heard of, this peer's daemon asks others for addresses and
tries them, which costs everybody far more than the message that asks for it. So the server counts a dial for each link
that a client asks for (`SetNeighbors`). A stream to a peer that is known, or being dialed already, costs little and
takes no place among the dials that are pending. The daemon dials peer ids only, never an address that a client chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from swarm.common.token_buckets import TokenBuckets
from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.transport.stream import Network, Stream

logger = logging.getLogger(__name__)

PUSH_CONNECT_TIMEOUT_S = 2.0
"""How long a push waits for the connection to the next server, which is opened when the link is made."""

PUSH_TIMEOUT_S = 5.0
MIN_BYTES_PER_S = 1e5
"""A push of n bytes fails after `PUSH_TIMEOUT_S + n / MIN_BYTES_PER_S` seconds."""


PUSHED_REPLY_DELAY_S = 1e-3
"""Time between a push and the copy for the client. Only the next server waits for the outputs. If both were sent at
once, the copy would delay this push (by a quarter, on one machine) and those of other sessions."""

MAX_PENDING = 64
MAX_PENDING_OF_CLIENT = 16
"""Unknown peers that are being dialed at a time: for all clients, and for one."""

BURST = 64.0
PER_S = 1.0
"""Unknown peers that a client may name at once, and then every second."""

KNOWN_COST = 1 / 16
"""What a dial costs, in dials of unknown peers, if the peer is known or being dialed for this client. A gateway may
have 256 sessions, each with one link, and opens all links again when a server leaves."""

KNOWN_S = 600.0
"""How long a peer that was reached counts as known, if dialing it does not fail before."""

MAX_REMEMBERED = 4096
"""Clients and peers that are remembered; those that were not used for longest are forgotten first."""


class PushLink:
    """One session's connection from this server to the next one.

    Args:
        network: this server's end of the network.
        client: peer id of the session's client.
        peer_id: the next server.
        session_id: the session there.
        dial: ends when the next server is reached, or cannot be.
    """

    def __init__(self, network: Network, client: str, peer_id: str, session_id: bytes, dial: Dial) -> None:
        self._client = client
        self._peer_id = peer_id
        self._session_id = session_id
        self._stream: Stream | None = None
        self._broken = False
        self._connected = asyncio.Event()
        self._dial = dial
        self._task: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(self._watch(network))

    def leads_to(self, peer_id: str, session_id: bytes) -> bool:
        """Whether it leads to this session at this server, and works."""
        return not self._broken and (peer_id, session_id) == (self._peer_id, self._session_id)

    async def push(self, step: messages.StepRequest, payload: bytes | memoryview) -> bool:
        """Send a step to the next server. False if that failed; True does not guarantee that it arrives."""
        if self._broken:  # possibly before it was connected
            return False
        try:
            if not self._connected.is_set():
                async with asyncio.timeout(PUSH_CONNECT_TIMEOUT_S):
                    await self._connected.wait()
            if self._stream is None or self._broken:
                return False
            request = messages.PushRequest(self._client, self._session_id, step)
            await self._stream.send(request, payload, PUSH_TIMEOUT_S + len(payload) / MIN_BYTES_PER_S)
        except (TimeoutError, RemoteError) as error:
            logger.debug("pushing to …%s failed: %r", self._peer_id[-6:], error)
            self._broken = True
            return False
        return True

    def close(self) -> None:
        """Push no more steps."""
        self._broken = True
        self._dial.give_up()
        if self._task is not None:
            self._task.cancel()
            self._task = None  # a canceled task keeps what it has done, and with it this link
        if self._stream is not None:
            self._stream.close()

    async def _watch(self, network: Network) -> None:
        """Connect, then wait: the next server only ever sends an error, or closes the connection."""
        try:
            self._stream = await network.open_stream(self._peer_id)
            self._dial.reached(asyncio.get_running_loop().time())
            self._connected.set()
            await self._stream.receive(0)
        except RemoteError as error:
            logger.debug("the link to …%s is gone: %s", self._peer_id[-6:], error)
            self._dial.failed()
        finally:
            self._dial.give_up()
            self._broken = True
            self._connected.set()
            if self._stream is not None:
                self._stream.close()


class DialBudget:
    """Counts the dials of one server. All times are seconds of one clock, passed in by the caller.

    Args:
        is_known: whether this peer knows another one anyway, from the DHT.
    """

    def __init__(self, is_known: Callable[[str], bool] = lambda peer_id: False) -> None:
        self._is_known = is_known
        self._accounts = TokenBuckets[str](BURST, PER_S, MAX_REMEMBERED)
        self._reached: OrderedDict[str, float] = OrderedDict()
        self._pending: dict[str, Counter[str]] = {}
        """For each client, its dials to each peer that was unknown."""

    def begin(self, client: str, peer_id: str, now: float) -> Dial | None:
        """A dial for `client`, which has to be ended; None if it has none left for now, or names itself."""
        if peer_id == client:
            return None
        is_known = now - self._reached.get(peer_id, -KNOWN_S) < KNOWN_S or self._is_known(peer_id)
        own = self._pending.get(client) or Counter[str]()
        is_cheap = is_known or peer_id in own
        if not is_cheap and (len(own) >= MAX_PENDING_OF_CLIENT or self._pending_in_all() >= MAX_PENDING):
            return None
        cost = KNOWN_COST if is_cheap else 1.0
        has_enough = self._accounts.left(client, now) >= cost
        self._accounts.take(client, cost if has_enough else 0.0, now)
        if not has_enough:
            return None
        if not is_known:
            self._pending.setdefault(client, Counter())[peer_id] += 1
        return Dial(self, client, peer_id, is_pending=not is_known)

    def end_pending(self, client: str, peer_id: str) -> None:
        """A dial to a peer that was unknown has ended."""
        own = self._pending[client]
        own[peer_id] -= 1
        if not own[peer_id]:
            del own[peer_id]
        if not own:
            del self._pending[client]

    def note_reached(self, peer_id: str, now: float) -> None:
        """A dial has reached the peer."""
        self._reached[peer_id] = now
        self._reached.move_to_end(peer_id)
        if len(self._reached) > MAX_REMEMBERED:
            self._reached.popitem(last=False)

    def note_failed(self, peer_id: str) -> None:
        """Forget a peer that could not be reached. Otherwise a client could take peers away and have them
        dialed for little."""
        self._reached.pop(peer_id, None)

    def _pending_in_all(self) -> int:
        return sum(map(len, self._pending.values()))


class Dial:
    """One dial. It has to be ended; only the first end counts."""

    def __init__(self, budget: DialBudget, client: str, peer_id: str, is_pending: bool) -> None:
        self._budget: DialBudget | None = budget
        self._client = client
        self._peer_id = peer_id
        self._is_pending = is_pending

    def reached(self, now: float) -> None:
        """The peer was reached."""
        if (budget := self._end()) is not None:
            budget.note_reached(self._peer_id, now)

    def failed(self) -> None:
        """The peer cannot be reached."""
        if (budget := self._end()) is not None:
            budget.note_failed(self._peer_id)

    def give_up(self) -> None:
        """Stop waiting for the result: it is no longer needed."""
        self._end()

    def _end(self) -> DialBudget | None:
        """The budget, at the first call."""
        budget, self._budget = self._budget, None
        if budget is not None and self._is_pending:
            budget.end_pending(self._client, self._peer_id)
        return budget
