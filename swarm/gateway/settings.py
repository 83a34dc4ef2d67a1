"""The settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.client.early_exit.options import EarlyExit
from swarm.generation.prompts import DEFAULT_CHAT_TOKENS


@dataclass(frozen=True)
class GatewaySettings:
    """What the operator of a gateway decides.

    Attributes:
        default_max_tokens: new tokens of a chat answer if the request sets no limit.
        max_request_bytes: of a request's body.
        read_timeout_s: within which a request's body has to arrive.
        send_timeout_s: within which a client has to take the next part of its response.
        cors_origins: other web sites whose pages may use this gateway; none by default.
        host_names: names under which the gateway is reached, such as that of a proxy, besides those of this machine.
        open: whether everybody who can reach the gateway may use it, if it listens for other machines without keys.
        max_concurrent_texts: texts that are generated at the same time; a request has one for each of its answers.
        max_waiting: requests that may wait.
        public_status: whether metrics and monitor are open to clients without a key, if there are keys.
        prefix_memory: bytes for what earlier requests have computed, of all models together; None for a share of this
            machine's free memory.
        early_exit: when tokens leave early in requests that do not say; None for never. Always verified.
        approximate_exits: whether requests may ask for tokens that leave without being verified.
    """

    default_max_tokens: int = DEFAULT_CHAT_TOKENS
    max_request_bytes: int = 2 * 2**20
    read_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    cors_origins: tuple[str, ...] = ()
    host_names: tuple[str, ...] = ()
    open: bool = False
    max_concurrent_texts: int = 64
    max_waiting: int = 256
    public_status: bool = False
    prefix_memory: int | None = None
    early_exit: EarlyExit | None = None
    approximate_exits: bool = False
