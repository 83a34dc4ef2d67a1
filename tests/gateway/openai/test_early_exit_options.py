"""The field `early_exit` of a request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from swarm import EarlyExit
from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.early_exit_options import early_exit_options
from swarm.gateway.openai.request_schema import parse_completion_request
from swarm.gateway.settings import GatewaySettings

PLAIN = GatewaySettings()
OPERATORS = GatewaySettings(early_exit=EarlyExit("similarity", 0.4, min_block=3))
APPROXIMATE = GatewaySettings(approximate_exits=True)


def options(settings: GatewaySettings, *asked: Any, classifiers: bool = False) -> EarlyExit | None:
    """What becomes of the field's value; without one, the field is left out."""
    body = {"model": "m", "prompt": "Once", **({"early_exit": asked[0]} if asked else {})}
    request = parse_completion_request(json.dumps(body).encode())
    served: Any = SimpleNamespace(name="m", has_exit_classifiers=classifiers)
    return early_exit_options(request.early_exit, settings, served)


@pytest.mark.parametrize("asked", [(), (None,)])
def test_a_request_that_does_not_say_has_the_operators_options(asked):
    assert options(PLAIN, *asked) is None
    assert options(OPERATORS, *asked) == OPERATORS.early_exit


def test_true_and_false():
    assert options(PLAIN, True) == EarlyExit()
    assert options(OPERATORS, True) == OPERATORS.early_exit
    assert options(OPERATORS, False) is None


def test_what_a_request_leaves_out_is_the_operators():
    assert options(OPERATORS, {"threshold": 0.1}) == EarlyExit("similarity", 0.1, min_block=3)
    assert options(PLAIN, {"threshold": 0.1, "decay": 2, "max_block": 6}) == EarlyExit(
        threshold=0.1, decay=2, max_block=6
    )
    assert options(PLAIN, {}) == EarlyExit()


def test_a_threshold_for_each_block():
    asked = options(PLAIN, {"threshold": {"4": 0.5, "8": 0.25}})
    assert asked is not None
    assert asked.threshold == {4: 0.5, 8: 0.25}


def test_values_that_are_not_possible():
    for asked in [
        1,
        {"threshold": 1.1},
        {"threshold": {}},
        {"threshold": {"4": 2}},
        {"confidence": "oracle"},
        {"verify": "no"},
        {"min_block": 5, "max_block": 4},
        {"batch": "all"},
        {"fill": "copy"},
        {"fill": "project"},
    ]:
        with pytest.raises(BadRequest) as caught:
            options(APPROXIMATE, asked)
        assert caught.value.param is not None
        assert caught.value.param.startswith("early_exit")


def test_provisional_text_needs_a_stream():
    body = {"model": "m", "prompt": "Once", "early_exit": {"provisional": True}}
    with pytest.raises(BadRequest, match=r"early_exit.provisional needs stream=true"):
        parse_completion_request(json.dumps(body).encode())
    request = parse_completion_request(json.dumps({**body, "stream": True}).encode())
    served: Any = SimpleNamespace(name="m", has_exit_classifiers=False)
    assert early_exit_options(request.early_exit, PLAIN, served) == EarlyExit()


def test_unverified_answers_need_the_operators_consent():
    with pytest.raises(BadRequest, match="which this gateway does not allow") as caught:
        options(OPERATORS, {"verify": False})
    assert caught.value.code == "approximate_not_allowed"
    assert options(APPROXIMATE, {"verify": False}) == EarlyExit(verify=False)
    projected = {"verify": False, "fill": "project"}
    with pytest.raises(BadRequest, match="which this gateway does not allow"):
        options(PLAIN, projected)
    assert options(APPROXIMATE, projected) == EarlyExit(verify=False, fill="project")


def test_classifiers_have_to_be_there():
    with pytest.raises(BadRequest, match="no classifiers for m"):
        options(PLAIN, {"confidence": "classifier"})
    assert options(PLAIN, {"confidence": "classifier"}, classifiers=True) == EarlyExit("classifier")
