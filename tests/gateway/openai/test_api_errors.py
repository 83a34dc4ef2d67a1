"""How clients are told of the project's errors."""

from __future__ import annotations

from swarm.errors import CacheFull, ChatTemplateError, MissingBlocks, PeerLost, SessionClosed, TooLong
from swarm.gateway.openai.api_errors import SWARM_FULL, TOO_LONG, BadRequest, api_error
from swarm.generation.errors import GenerationCrashed, InvalidGenerationRequest

INTERNAL = "the gateway failed; its log has the details"


def test_statuses_and_messages():
    for error, status, message, param, code, headers in [
        (BadRequest("no", param="n", code="x"), 400, "no", "n", "x", {}),
        (InvalidGenerationRequest("no", parameter="prompt", code="x"), 400, "no", "prompt", "x", {}),
        (ChatTemplateError("no"), 400, "no", "messages", "template_refused", {}),
        (TooLong("ask for a smaller max_length"), 400, TOO_LONG, "max_tokens", "context_length_exceeded", {}),
        (MissingBlocks((1,)), 503, str(MissingBlocks((1,))), None, "blocks_missing", {"Retry-After": "10"}),
        (CacheFull("ask for a smaller max_length"), 503, SWARM_FULL, None, "swarm_full", {"Retry-After": "10"}),
        (PeerLost("gone"), 503, "the swarm failed: gone", None, "peer_lost", {"Retry-After": "10"}),
        (SessionClosed("closed"), 500, INTERNAL, None, "internal_error", {}),
        (GenerationCrashed("why"), 500, INTERNAL, None, "internal_error", {}),
        (KeyError("secret"), 500, INTERNAL, None, "internal_error", {}),
    ]:
        reported = api_error(error)
        assert (reported.status, dict(reported.headers)) == (status, headers)
        body = reported.body()["error"]
        assert (body["message"], body["param"], body["code"]) == (message, param, code)
