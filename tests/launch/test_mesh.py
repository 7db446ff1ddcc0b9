"""The interface that ranks of a mesh meet over; the rest is tests/multirank/test_mesh.py's."""

from __future__ import annotations

import pytest

from ppstream.launch.mesh import interface_of


@pytest.mark.parametrize(
    ("address", "name"), [("127.0.0.1", "lo"), ("203.0.113.9", None), ("2001:db8::9", None)]
)
def test_an_interface_is_found_by_its_address(address: str, name: str | None) -> None:
    assert interface_of(address) == name
