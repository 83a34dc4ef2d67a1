"""The page of models says what the tests and transformers know now."""

from __future__ import annotations

from scripts.models_page import PAGE, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: make models > docs/models.md"
