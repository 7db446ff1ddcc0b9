"""The few shapes that a page draws, as SVG text, and linear scales with round ticks. Pure.

No chart types, no colours: what a shape means stands in its class, what it looks like in the
page's style sheet, so that light, dark and print need no second drawing. No script either: a
shape's ``tip`` is its ``<title>``, which browsers show and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """From values ``low..high`` to places ``start..end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the scale, some ``about`` of them."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        size = 10.0 ** math.floor(math.log10(span / about))
        step = next(size * k for k in (1, 2, 5, 10) if span / (size * k) <= about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


class Drawing:
    """Shapes on a sheet of ``width`` x ``height`` units; ``str()`` gives the SVG element."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self._label = width, height, label
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, tip: str = ""
    ) -> None:
        attributes = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(0, width))}" height="{_n(height)}"'
        self._add("rect", attributes, kind, tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, tip: str = "") -> None:
        attributes = f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
        self._add("line", attributes, kind, tip)

    def path(self, points: Iterable[Pair], kind: str, *, closed: bool = False) -> None:
        steps = " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._add("path", f'd="M{steps}{"Z" if closed else ""}"', kind, "")

    def dot(self, x: float, y: float, radius: float, kind: str, tip: str = "") -> None:
        self._add("circle", f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"', kind, tip)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        attributes = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        self._parts.append(f'<text {attributes} class="{kind}">{escape(text)}</text>')

    def x_axis(self, scale: Axis, y: float, unit: str, *, top: float | None = None) -> None:
        """Ticks below ``y``, all of them on the sheet, and grid lines up to ``top``."""
        ticks = scale.ticks()
        for number, value in enumerate(ticks):
            x = scale(value)
            if top is not None:
                self.line(x, top, x, y, "grid")
            name = f"{value:g} {unit}" if number == len(ticks) - 1 else f"{value:g}"
            half = 4 * len(name)
            anchor = "start" if x < half else "end" if x + half > self.width else "middle"
            at = {"start": 0.0, "end": self.width}.get(anchor, x)
            self.text(at, y + 16, name, "tick", anchor)
        self.line(scale.start, y, scale.end, y, "axis")

    def y_axis(self, scale: Axis, x: float, right: float, unit: str = "", about: int = 4) -> None:
        """Ticks left of ``x``, and grid lines to ``right``."""
        ticks = scale.ticks(about)
        for number, value in enumerate(ticks):
            y = scale(value)
            self.line(x, y, right, y, "grid")
            name = f"{value:g} {unit}".rstrip() if number == len(ticks) - 1 else f"{value:g}"
            self.text(x - 7, y + 4, name, "tick", "end")

    def _add(self, shape: str, place: str, kind: str, tip: str) -> None:
        if tip:
            self._parts.append(
                f'<{shape} {place} class="{kind}"><title>{escape(tip)}</title></{shape}>'
            )
        else:
            self._parts.append(f'<{shape} {place} class="{kind}"/>')

    def __str__(self) -> str:
        box = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        body = "".join(self._parts)
        return f'<svg {box} role="img" aria-label="{escape(self._label)}">{body}</svg>'


def steps(xs: Sequence[float], levels: Sequence[float], end: float) -> list[Pair]:
    """The corners of a step line: ``levels[i]`` holds from ``xs[i]`` to the next, to ``end``."""
    corners: list[Pair] = []
    for i, level in enumerate(levels):
        until = xs[i + 1] if i + 1 < len(xs) else end
        corners += [(xs[i], level), (until, level)]
    return corners


def _n(value: float) -> str:
    """Two digits are enough for any screen, and keep the page small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
