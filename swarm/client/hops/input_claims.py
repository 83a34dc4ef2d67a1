"""What one server says that it has computed, until the client has compared that with its own copies. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class Claim:
    """What a server has answered.

    Attributes:
        checksum: of the input that it computed, as it says; None if the answer does not belong to a step of this
            client.
        error: why its outputs cannot be used; None if they can.
    """

    checksum: bytes | None
    error: ProtocolViolation | None = None


class InputClaims:
    """The claims of one server that have not been compared with this client's copies yet.

    Attributes:
        was_open: whether another server was ever let into the session.
        open: the claims that are left, by step.
    """

    def __init__(self) -> None:
        self.was_open = False
        self.open: dict[int, Claim] = {}
        self._no_copy_until = -1

    def add(self, number: int, claim: Claim) -> None:
        """The server has answered a step. Only its first answer counts."""
        self.open.setdefault(number, claim)

    def first(self) -> tuple[int, Claim] | None:
        """The first claim that is left, and its step's number."""
        if not self.open:
            return None
        number = min(self.open)
        return number, self.open[number]

    def settle(self, number: int) -> None:
        """The claim is right."""
        del self.open[number]

    def forget_after(self, number: int) -> None:
        """The steps after `number` were given up, or will be sent again."""
        self.open = {step: claim for step, claim in self.open.items() if step <= number}

    def on_pusher_replaced(self, last_begun: int) -> None:
        """Copies of the steps up to `last_begun` may come from another server than the one that pushed them."""
        self._no_copy_until = max(self._no_copy_until, last_begun)

    def has_copy(self, number: int) -> bool:
        """Whether this client's copy of a step is what was pushed."""
        return number > self._no_copy_until
