"""Interpreters in which clients that others publish are installed."""

from __future__ import annotations

import pytest
from bench.peers_environments import Unavailable, python_with


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    """One that has what the test's module names ``PACKAGE``."""
    package = request.module.PACKAGE
    try:
        return str(python_with(package))
    except Unavailable as error:
        pytest.skip(f"{package} cannot be had: {error}")
