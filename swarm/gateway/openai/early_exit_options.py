"""The field `early_exit` of a request, with what the operator allows, as options of a generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from swarm.client.early_exit.options import EarlyExit
from swarm.data_structures import ExitConfidence
from swarm.errors import UsageError
from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.settings import GatewaySettings
from swarm.generation.served_model import ServedModel

MAX_BLOCKS = 4096
"""More than any model has."""

Block = Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
Threshold = Annotated[float, Meta(ge=0, le=1)]
ThresholdByBlock = Annotated[dict[Block, Threshold], Meta(min_length=1, max_length=MAX_BLOCKS)]


class EarlyExitRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The object in `early_exit`; see `swarm.EarlyExit`. What it leaves out is as the operator set it.

    `provisional` asks for events with the text of tokens that are not verified yet.
    """

    confidence: ExitConfidence | None = None
    threshold: Threshold | ThresholdByBlock | None = None
    decay: Annotated[float, Meta(ge=0, le=1000)] | None = None
    verify: bool | None = None
    fill: Literal["exact", "project"] | None = None
    min_block: Block | None = None
    max_block: Block | None = None
    provisional: bool = False


def early_exit_options(
    asked: EarlyExitRequest | bool | None, settings: GatewaySettings, served: ServedModel
) -> EarlyExit | None:
    """When the tokens of a request leave early; None for never.

    Args:
        asked: by the request: None for the operator's default, True for exits in any case, False for none.

    Raises:
        BadRequest: the values are not possible together, not for this model, or not allowed by the operator.
    """
    if asked is None:
        return settings.early_exit
    if asked is False:
        return None
    options = settings.early_exit or EarlyExit()
    if isinstance(asked, EarlyExitRequest):
        given = {name: value for name, value in structs.asdict(asked).items() if value is not None}
        del given["provisional"]  # is about the response
        try:
            options = replace(options, **given)
        except UsageError as error:
            raise BadRequest(f"early_exit: {error}", param="early_exit") from None
    if not options.verify and not settings.approximate_exits:
        raise BadRequest(
            "early_exit with verify=false gives approximate answers, which this gateway does not allow; leave verify "
            "out, or ask its operator for --approximate-exits",
            param="early_exit",
            code="approximate_not_allowed",
        )
    if options.confidence == "classifier" and options.fill == "exact" and not served.has_exit_classifiers:
        raise BadRequest(
            f"early_exit: this gateway has no classifiers for {served.name}; use another confidence",
            param="early_exit",
        )
    return options
