"""Types of a configuration's tables and values: bounded numbers, names and paths.

What they mean stands in ``schema.py`` and ``run_tables.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Interpolation = Literal["linear", "previous", "nearest", "slerp", "angle", "cubic"]
Positive = Annotated[float, Meta(gt=0)]
#: Largest change; inf sets no limit.
RateLimit = Annotated[float, Meta(gt=0, extra={"infinite": True})]
NonNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[  # fits the wire and a log's key
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_/-]{1,64}\Z",
        extra={"want": "1 to 64 letters, digits, '_', '-' or '/'"},
    ),
]
RobotName = Annotated[  # as a robot says it: any text that the wire takes
    str, Meta(pattern=r"(?s)^.{1,64}\Z", extra={"want": "1 to 64 characters"})
]
Target = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z",
        extra={"want": "'package.module:attr'"},
    ),
]
Module = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z", extra={"want": "'package.module'"}),
]
Device = Annotated[
    str,
    Meta(pattern=r"^(cpu|cuda(:\d{1,2})?)\Z", extra={"want": "'cpu' or 'cuda:<number>'"}),
]
#: One device stands for a list of one.
Devices = Annotated[tuple[Device, ...], Meta(min_length=1, extra={"one": True})]
PacingRule = Annotated[
    str,
    Meta(
        pattern=r"^(sample(:.+)?|rows|tick|free|saturated)\Z",
        extra={"want": "one of sample, sample:<stream>, rows, tick, free, saturated"},
    ),
]
FilePath = Annotated[str, Meta(min_length=1, extra={"path": True})]  # made absolute when read


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the configuration: frozen, and no unknown key passes."""
