"""Which pages may send requests, without a network."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from swarm.gateway.access.cors import check_origin
from swarm.gateway.openai.api_errors import OriginNotAllowed

OURS = "https://chat.example"


@pytest.mark.parametrize(
    ("site", "origin", "origins", "may"),
    [
        (None, None, (), True),  # no browser
        (None, "https://else.where", (), True),  # nor this: a browser says both
        ("same-origin", "http://127.0.0.1:8000", (), True),
        ("none", None, (), True),
        ("cross-site", "https://else.where", (), False),
        ("cross-site", "null", (), False),
        ("cross-site", None, (), False),
        ("same-site", "http://127.0.0.1:3000", (), False),
        ("cross-site", OURS, (OURS,), True),
        ("cross-site", "https://else.where", (OURS,), False),
        ("cross-site", "https://else.where", ("*",), True),
    ],
)
def test_pages_from_elsewhere(site, origin, origins, may):
    named = {"sec-fetch-site": site, "origin": origin}
    headers = Headers({name: value for name, value in named.items() if value is not None})
    if may:
        check_origin(headers, origins)
    else:
        with pytest.raises(OriginNotAllowed, match="pages of other sites may not use this gateway"):
            check_origin(headers, origins)
