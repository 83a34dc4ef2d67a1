"""Serves the files of a page, and the ones that all pages share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

SHARED_FOLDER = Path(__file__).with_name("page")
SHARED_FILES = frozenset({"palette.css"})


class PageFiles(StaticFiles):
    """Static files of one page and of `SHARED_FOLDER`.

    Args:
        folder: the page's files.
        headers: added to every response.
    """

    def __init__(self, folder: Path, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(directory=folder)
        self._headers = headers or {}

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path in SHARED_FILES:
            file = SHARED_FOLDER / path
            return str(file), file.stat()
        return super().lookup_path(path)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response
