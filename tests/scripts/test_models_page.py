"""The page of models says what the tests and transformers know now."""

from __future__ import annotations

from scripts.models_page import PAGE, causal_families, page


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run: make models > docs/models.md"


def test_at_least_130_families_are_served():
    assert sum(not problem for _, problem in causal_families()) >= 130
