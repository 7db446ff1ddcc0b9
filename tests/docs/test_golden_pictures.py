"""The run-book's pictures and numbers are those of the golden cases, and stay so."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from dev import draw_golden_cases

PAGE = draw_golden_cases.ROOT / "runbooks" / "how-overlap-is-proven.md"


@pytest.mark.parametrize("name", draw_golden_cases.CASES)
def test_picture_and_row_are_up_to_date(name: str) -> None:
    """Draw them again with ``python tools/dev/draw_golden_cases.py``."""
    picture, row = draw_golden_cases.draw(name)
    file = draw_golden_cases.FOLDER / f"{name}.svg"
    assert file.read_text(encoding="utf-8") == picture
    ET.fromstring(picture)
    page = PAGE.read_text(encoding="utf-8")
    assert f"pictures/{name}.svg" in page
    assert row in page
