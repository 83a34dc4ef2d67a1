"""Errors of generating text. They know nothing of HTTP: the gateway maps them to statuses."""

from __future__ import annotations

from swarm.errors import ChatTemplateError, MissingBlocks, RemoteError, SwarmError


class InvalidGenerationRequest(SwarmError):
    """The request asks for something that this model cannot do; the request has to change.

    Attributes:
        parameter: the request's parameter that is wrong, by its name in OpenAI's API; None if it is not a single one.
        code: a short name for programs.
    """

    def __init__(self, message: str, *, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class GenerationCrashed(SwarmError):
    """Generation failed because of a bug. The traceback is in the log."""


class GenerationCancelled(SwarmError):
    """The sequence was cancelled before it was complete."""


EXPECTED_ERRORS = (InvalidGenerationRequest, MissingBlocks, ChatTemplateError, RemoteError)
"""What can go wrong without a bug in this process. These errors are reported as they are."""
