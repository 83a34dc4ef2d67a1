"""Authentication by API key, in the header `Authorization: Bearer KEY`."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.gateway.admission.api_keys import ApiKey
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.http.responses import error_response
from swarm.gateway.openai.api_errors import InvalidApiKey


async def authenticate(gateway: GatewayState, headers: Headers) -> ApiKey | None:
    """The key of a request; None if the gateway has no keys.

    Raises:
        InvalidApiKey: the request has no key, or an unknown one.
    """
    keys = await gateway.keys()
    if keys is None:
        return None
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    key = keys.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        gateway.metrics.request_refused("unauthorized")
        problem = "this gateway does not know the key" if secret else "a key is required: Authorization: Bearer KEY"
        raise InvalidApiKey(
            f"{problem}; the operator of the gateway creates keys with `swarm keys add`", code="invalid_api_key"
        )
    return key


class RequireApiKey:
    """Rejects requests without a key to paths under `/api`, unless the status is public.

    The pages themselves are open: they are the same for everyone, and ask for the key.
    """

    def __init__(self, app: ASGIApp, gateway: GatewayState) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if not self._gateway.settings.public_status and "/api/" in scope["path"]:
                await authenticate(self._gateway, Headers(scope=scope))
        except InvalidApiKey as error:
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
