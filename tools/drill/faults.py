"""The faults as data: what is done, what shall follow, and within which bound.

``Ending``: the run ends, with these codes. ``Recovering``: it goes on, and the fault is visible.
Numbers F.. and BT.. are those of runbooks/faults.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from drill.scene import Failed, Scene

from ppstream.core.clock import NS_PER_S, now_ns

#: Who is stuck is named where all stacks are: the policy or decoder of the drill.
FRONT_STACKS: Final = ("rank0.gen0.stacks.txt", "drill/policy.py")
BACK_STACKS: Final = ("rank1.gen0.stacks.txt", "drill/policy.py")
HELD_S: Final = 0.5  # that a robot stands still for certain
SAFE_S: Final = 0.5  # lease (0.3 s), one tick, and what was on its way
Seen = str | None  # None: not yet


@dataclass(frozen=True)
class Ending:
    """A fault that ends the run.

    ``codes``: of rank 0 and the policy ranks; negative: the signal that ended it; None: any.
    ``notice_s``: until the first of the ranks left has ended; ``gone_s``: until all have.
    """

    name: str
    ids: str
    does: str
    inject: Callable[[Scene], None]
    codes: tuple[int | None, ...]
    gone_s: float
    says: str  # part of what the ranks print
    leaves: tuple[str, str] | None = None  # a file in the run's folder, and part of its text
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recovering:
    """A fault that the run survives.

    ``seen``: looks for the evidence that the fault happened and was treated, given the moment of
    the injection. ``undo``: ends the fault, once it was seen. ``moves_s``: then the robot moves
    again within this. ``holds``: it held meanwhile.
    """

    name: str
    ids: str
    does: str
    inject: Callable[[Scene], None]
    seen: Callable[[Scene, int], Seen]
    seen_s: float
    undo: Callable[[Scene], None] = lambda scene: None
    moves_s: float = 2.0
    holds: bool = False
    settings: tuple[str, ...] = ()  # of the run it is injected into


def order(kind: str, envelopes: int, part: str = "") -> Callable[[Scene], None]:
    return lambda scene: scene.order_policy(kind, envelopes, part)


def robot(name: str, value: float) -> Callable[[Scene], None]:
    return lambda scene: scene.order_robot(name, value)


def cable(**state: Any) -> Callable[[Scene], None]:
    def set_state(scene: Scene) -> None:
        for name, value in state.items():
            setattr(scene.cable, name, value)

    return set_state


def event(name: str, **fields: Any) -> Callable[[Scene, int], Seen]:
    def look(scene: Scene, since_ns: int) -> Seen:
        line = scene.event(since_ns, name, **fields)
        hidden = {"kind", "run_id", "generation", "t", "text", "place"}
        shown = () if line is None else ((k, v) for k, v in line.items() if k not in hidden)
        return ", ".join(f"{k} {v}" for k, v in shown) or None

    return look


def condition(stream: str, wanted: str, after_s: float) -> Callable[[Scene, int], Seen]:
    """Seen once a stream is in that condition, so long after the injection."""
    return _newest("sensor", after_s, {"stream": stream}, condition=wanted)


def degraded(after_s: float) -> Callable[[Scene, int], Seen]:
    """Seen once the run is degraded, so long after the injection."""
    return _newest("degraded", after_s, {}, degraded=True)


def _newest(
    name: str, after_s: float, which: Mapping[str, str], **wanted: Any
) -> Callable[[Scene, int], Seen]:
    """Seen once the newest of these events has what is wanted.

    They are told when something changes: the fault before may have left it so for a moment.
    """

    def look(scene: Scene, since_ns: int) -> Seen:
        told = [e for e in scene.lines() if e.get("name") == name and which.items() <= e.items()]
        is_late = now_ns() - since_ns > after_s * NS_PER_S
        is_so = bool(told) and wanted.items() <= told[-1].items()
        shown = ", ".join(f"{key} {value}" for key, value in {**which, **wanted}.items())
        return shown if is_so and is_late else None

    return look


def dropped(reason: str) -> Callable[[Scene, int], Seen]:
    """Seen once the ledger counts more under ``reason`` than at the first look."""
    before: dict[int, int] = {}

    def look(scene: Scene, since_ns: int) -> Seen:
        count = scene.drops(reason)
        first = before.setdefault(since_ns, count)
        return f"{count - first} dropped: {reason}" if count > first else None

    return look


def moved(ticks: int) -> Callable[[Scene, int], Seen]:
    """Seen once the robot has moved in so many ticks all the same."""

    def look(scene: Scene, since_ns: int) -> Seen:
        all_ticks = scene.ticks(since_ns)
        count = sum(tick.moved for tick in all_ticks)
        return f"the robot moved in {count} of {len(all_ticks)} ticks" if count >= ticks else None

    return look


def held(seconds: float) -> Callable[[Scene, int], Seen]:
    """Seen once the robot has held for so long."""

    def look(scene: Scene, since_ns: int) -> Seen:
        ticks = scene.ticks(since_ns)
        moved = [tick.at_ns for tick in ticks if tick.moved]
        newest_ns = ticks[-1].at_ns if ticks else since_ns
        still_ns = newest_ns - (moved[-1] if moved else since_ns)
        return f"the robot held for {still_ns / 1e9:.1f} s" if still_ns > seconds * 1e9 else None

    return look


def reported_fault(fault: str, safe_s: float) -> Callable[[Scene, int], Seen]:
    """Seen once rank 0's log has a robot's fault that begins so, and the robot has held on.

    It must hold within ``safe_s``, and may not move again by itself while that is looked at.
    """

    def look(scene: Scene, since_ns: int) -> Seen:
        ticks = scene.ticks(since_ns)
        held_ns = next((tick.at_ns for tick in ticks if not tick.moved), None)
        texts = [one for one in scene.lines() if one["kind"] == "robot_state"]
        if held_ns is None or not texts or not texts[-1]["fault"].startswith(fault):
            return None
        if held_ns - since_ns > safe_s * NS_PER_S:
            raise Failed(f"held after {(held_ns - since_ns) / 1e9:.3f} s, limit {safe_s:g} s")
        if any(tick.moved for tick in ticks if tick.at_ns > held_ns):
            raise Failed("it moved again by itself")
        is_long = ticks[-1].at_ns - held_ns > HELD_S * NS_PER_S
        return f"rank 0 was told: {texts[-1]['fault'][:60]}" if is_long else None

    return look


def input_age(stream: str, ms: float) -> Callable[[Scene, int], Seen]:
    """Seen once a window was cut whose newest sample of ``stream`` is older than this."""

    def look(scene: Scene, since_ns: int) -> Seen:
        for line in scene.lines():
            if line["kind"] == "envelope" and (line.get("tA0") or 0) >= since_ns:
                age_ns = line.get("input_age_ns", {}).get(stream)
                if age_ns is None or age_ns > ms * 1e6:
                    age = "nothing" if age_ns is None else f"{age_ns / 1e6:.0f} ms old"
                    return f"{stream} in the window: {age}, masked, and the run goes on"
        return None

    return look
