"""The version of this package, which ranks compare, logs keep and metrics show."""

from typing import Final

VERSION: Final = "0.1.0"
