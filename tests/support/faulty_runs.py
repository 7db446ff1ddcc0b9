"""Golden runs with a fault bent in, and the lines that a run's log has beside its envelopes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from golden_runs import TAIL, Fields, GoldenRun, ms, simulate, stages

from ppstream.analysis.period_model import PipelineForm, StageTimes

SPLIT, ONE_CREDIT = PipelineForm("split"), PipelineForm("split", d_in=1)
SLOW_INPUT = stages(t_in=40)


def event(name: str, **fields: Any) -> Fields:
    return {"kind": "event", "name": name, "t": 1, "generation": 0} | fields


def said(verdict: str, *reasons: str, overlap: float = 1.0) -> Fields:
    """What the run itself logged at the end of its bring-up."""
    return event("verdict", verdict=verdict, reasons=list(reasons), overlap=overlap)


def machine(cpus: float, threads: int = 2, **more: Any) -> Fields:
    fields = {"usable_cpus": cpus, "busy_threads": threads, "load_1min": 2.0, "steal_share": 0.0}
    return event("machine", **fields | more)


def alone(golden: GoldenRun, *times: float, key: str = "standalone") -> GoldenRun:
    """With these times of A, B and C alone, in ms."""
    return golden.set(key, {f"{k}_ns": ms(v) for k, v in zip("ABC", times, strict=True)})


def cpu(golden: GoldenRun, c: float, b: float, late: float = 0, **late_a: float) -> GoldenRun:
    """With this CPU time of C and B, and these waits for a CPU."""
    golden.put(cpu_c_ns=ms(c), delay_c_ns=ms(late), **{k: ms(v) for k, v in late_a.items()})
    return golden.put(1, cpu_b_ns=ms(b), delay_b_ns=ms(late))


def first_alone(golden: GoldenRun, work: tuple[float, ...], late: float) -> GoldenRun:
    """The first envelopes went one by one: CPU time of A, B and C, and waits of B and C for one."""
    golden.put(at=slice(20), mode="alone", phase="warming", cpu_a_ns=ms(work[0]), delay_a_ns=0)
    golden.put(at=slice(20), cpu_c_ns=ms(work[2]), delay_c_ns=ms(late))
    return golden.put(1, slice(20), cpu_b_ns=ms(work[1]), delay_b_ns=ms(late))


def joined(first: GoldenRun, second: GoldenRun, by_ms: float) -> GoldenRun:
    second.later(by_ms)
    for lines, more in zip(first.stamped, second.stamped, strict=True):
        lines += more
    return first


def served(times: Any, n: int = 120, bring_up: GoldenRun | None = None, **ids: Any) -> GoldenRun:
    """Bring-up, and behind it a service with these stages."""
    ready = simulate(times, n=n, phase="ready", epoch=1, **ids)
    return joined(bring_up or simulate(), ready, 10_000)


def robot(**fields: Any) -> Fields:
    counts = {"holds": 3, "held_ns": 0, "faults": 0, "fault": "", "chunk_gap_ns": ms(30)}
    return {"kind": "robot_state", "session": 5, "t": 1} | counts | fields


def sessions(told: Sequence[tuple[float, float]], first: int = 5, name: str = "arm") -> list[Any]:
    """Accounts of one robot's sessions: when the newest one came, and what it held, in ms."""
    return [
        robot(session=first + k, robot=name, t=ms(t), held_ns=ms(held), faults=int(not k))
        for k, (t, held) in enumerate(told)
    ]


def dropped(golden: GoldenRun, every: int, *reasons: str) -> GoldenRun:
    """All but each ``every``-th envelope is dropped, for these reasons in turn."""
    for k, (line, reason) in enumerate(zip(golden.lines, cycle(reasons), strict=False)):
        if k % every:
            line |= {"drop": reason, "tEmit": None, "age_rank0_ns": None}
    return golden


def cut(seq_from: int) -> GoldenRun:
    first, second = simulate(n=200), simulate(n=200, epoch=1)
    for line in (line for lines in second.stamped for line in lines):
        line["seq"] += seq_from
    end_ns = first.lines[-1]["tEmit"]
    return joined(first.tell(event("epoch_cut", epoch=1, t=end_ns)), second, end_ns / ms(1) + 900)


def idle(*waits: str) -> GoldenRun:
    golden = simulate(form=SPLIT, phase="ready", pacing="sample").later(500, slice(200, None))
    waits = (*waits, "wait_input_ns", "idle_ns")
    golden.add(1, slice(200, 201), wait_input_ns=500, idle_ns=500)
    return golden.add(at=slice(200, 201), **dict.fromkeys(waits, 500))


def nobodys_fault() -> GoldenRun:
    golden = simulate(n=900).put(at=slice(0, None, 3), drop="stale")
    golden.put(at=slice(1, None, 6), drop="absent").put(at=slice(4, None, 12), drop="answered")
    return golden.put(at=slice(10, None, 12), drop="session_reset")


def warming() -> GoldenRun:
    return simulate([stages(b=10 * 1.02 ** max(0, 60 - k)) for k in range(340)], SPLIT)


def unsettled() -> GoldenRun:
    return simulate([stages(a=1, b=4 * 1.05 ** (k % 60), c=1) for k in range(340)], SPLIT)


def unnamed(times: Any, **more: Any) -> GoldenRun:
    """A writer that calls its waits for input link calls."""
    golden = simulate(times, SPLIT).put(busy_link_ns=lambda line: line["w_input_ns"], w_input_ns=0)
    return golden.put(**more)


def leased(phase: str, lease_ms: float = 15) -> GoldenRun:
    ends = {"window_end_ns": [ms(123), 0], "expires_ns": [ms(123 + lease_ms), 0]}
    return simulate(phase=phase).put(**ends)


def wait_in_b(golden: GoldenRun) -> GoldenRun:
    """tB0 before the receive, told consistently."""
    golden.put(B_ns=lambda line: line["B_ns"] + line["wait_input_ns"])
    golden.put(residence_ns=lambda line: line["B_ns"], wait_input_ns=0, idle_ns=0)
    return golden.lose(rank=1)


def links_in_b() -> GoldenRun:
    """B takes in both links, in both files."""
    golden = simulate(stages(2, 5, 4, x=6), PipelineForm(d_in=1))
    golden.put(idle_ns=lambda line: line["idle_ns"] or ms(12))
    golden.put(1, idle_ns=lambda line: line["idle_ns"] or ms(12))
    for rank in (0, 1):
        golden.add(rank, residence_ns=12, wait_input_ns=-12, idle_ns=-12)
    return golden.add(B_ns=12).add(1, tB0=-12)


def a_before_credit(form: PipelineForm = ONE_CREDIT) -> GoldenRun:
    golden = simulate(form=form).put(tRx=lambda line: line["tRx"] - line["w_credit_ns"])
    return golden.put(tA0=lambda line: line["tA0"] - line["w_credit_ns"], w_credit_ns=0)


def b_alone_behind() -> GoldenRun:
    golden = simulate(n=360).tell(simulate(n=330).book())
    golden.extra[0]["t"] = golden.lines[329]["tEmit"]
    for k in range(30):
        golden.later(100 + 30 * k, slice(330 + k, 331 + k))
    return golden.put(at=slice(330, None), mode="alone")


def received_late() -> GoldenRun:
    """On a busy machine a thread may lose its CPU between a receipt's stamp and its counter."""
    at = slice(10, None, 4)
    golden = simulate(form=SPLIT, n=130).add(at=at, outstanding_ns_total=300)
    return golden.put(at=at, outstanding=lambda line: line["outstanding"] + 1)


def twice() -> GoldenRun:
    golden = simulate()
    golden.lines.append(dict(golden.lines[-1]))
    return golden


def swapped() -> GoldenRun:
    golden = simulate()
    one, other = golden.lines[50:52]
    one["tEmit"], other["tEmit"] = other["tEmit"], one["tEmit"]
    return golden


def taken_out(*, renumbered: bool) -> GoldenRun:
    golden = simulate()
    golden.tell(golden.book()).lose(at=slice(100, 110))
    for lines in golden.stamped:
        for k, line in enumerate(lines if renumbered else ()):
            line["seq"] = k
    return golden


def full_disk() -> GoldenRun:
    """The lines of service are missing, which are not judged."""
    golden = simulate()
    end_ns = golden.lines[-1]["tEmit"]
    later = {"received": 900, "used": 900, "dropped": {}, "in_flight": 0}
    golden.tell(golden.book(), event("phase", phase="bring-up", t=0))
    golden.tell(event("phase", phase="ready", t=end_ns + 1))
    return golden.tell({"kind": "ledger", "t": end_ns + ms(999), "envelopes": later})


def disk_full_for_a_time(n: int) -> GoldenRun:
    """A run that drained lacks so many lines in the midst of its service."""
    golden, bring_up = served(stages()), simulate()
    end_ns = bring_up.lines[-1]["tEmit"]
    golden.tell(bring_up.book(), golden.book(), event("phase", phase="bring-up", t=0))
    golden.tell(event("phase", phase="ready", t=end_ns + 1))
    golden.tell(event("phase", phase="draining", t=golden.lines[-1]["tEmit"]))
    return golden.lose(at=slice(350, 350 + n)).set("finished_utc", "then")


def killed_in_service(*, tail: int = 0, hole: int = 0) -> GoldenRun:
    """The log of a run without an end lacks its last lines, or some in the midst of service."""
    golden = disk_full_for_a_time(hole).set("finished_utc", None)
    golden.extra.pop()  # the end of service
    return golden.lose(at=slice(len(golden.lines) - tail, None))


def unserved(*robots: Fields, lease_ms: float = 300, **joints: Any) -> GoldenRun:
    """Bring-up, then ready for 999 ms without an envelope; no sample of joints comes, or these."""
    golden = simulate().set("config.actions", {"lease_ms": float(lease_ms)})
    book, end_ns = golden.book(), golden.lines[-1]["tEmit"]
    none = {"received": 0, "used": 0, "dropped": {}, "in_flight": 0, "holes": 0}
    golden.tell(event("phase", phase="ready", t=end_ns + 1), *robots)
    return golden.tell(book | {"t": end_ns + ms(999), "streams": {"joints": none | joints}})


def on_another_clock(golden: GoldenRun) -> GoldenRun:
    """Its policy rank was ready, too, at a stamp that means nothing on rank 0."""
    golden.policy_lines.append(event("phase", phase="ready", t=1))
    return golden


def unbalanced() -> GoldenRun:
    golden = simulate()
    book = golden.book()
    book["envelopes"]["used"] -= 1
    return golden.tell(book)


def busy(**more: Any) -> GoldenRun:
    """B and C wait 3 ms for a CPU, A one, which was not so when they were alone."""
    golden = simulate(stages(2, 15, 9)).set("config.bringup.overlap_min", 0.7)
    alone(golden, 1, 12, 6).tell(machine(2, **more))
    return cpu(golden, 6, 12, 3, delay_a_ns=1)


def locked(b: float = 21, c: float = 20, late: float = 0) -> GoldenRun:
    return cpu(alone(simulate(stages(0.5, b, c), n=360), 0.5, b, c), 10, 11, late)


def unset(path: str, golden: GoldenRun | None = None) -> GoldenRun:
    golden = golden or simulate()
    *tables, key = path.split(".")
    table: Any = golden.manifest
    for name in tables:
        table = table[name]
    del table[key]
    return golden


# ---- chains -------------------------------------------------------------------------------------


def contended_place(golden: GoldenRun, place: int, alone_ms: float) -> GoldenRun:
    """This place took less alone, and waits for something inside its B in the run."""
    found = golden.manifest["standalone"]
    found["places_ns"][place - 1] = ms(alone_ms)
    found["B_ns"] = max(found["places_ns"])
    return golden.put(place, cpu_b_ns=ms(alone_ms))


def without_places(golden: GoldenRun) -> GoldenRun:
    for rank in range(1, len(golden.stamped)):
        golden.lose(rank=rank)
    return golden


def at_once(golden: GoldenRun, place: int) -> GoldenRun:
    """A B of this place begins, and ends, in the middle of the one before it."""
    return golden.add(place, slice(150, 151), tB0=-3, tB1=-3)


def turned_round(golden: GoldenRun, place: int) -> GoldenRun:
    """Two envelopes change places there."""
    one, other = golden.stamped[place][150:152]
    for stamp in ("tB0", "tB1"):
        one[stamp], other[stamp] = other[stamp], one[stamp]
    return golden


def in_turns(*b_ms: float, n: int = 330) -> list[StageTimes]:
    """Stage times of envelopes that go to replicas whose B take so long, in turn."""
    each = [stages(a=4, b=b, c=1, x=0.1) for b in b_ms]
    return [each[k % len(each)] for k in range(n + TAIL)]


def answered_by_another(golden: GoldenRun) -> GoldenRun:
    """A line of replica 1 stands in the log of replica 2."""
    golden.behind[0].append(golden.policy_lines.pop(50))
    return golden


def in_parts(golden: GoldenRun, parts: Sequence[list[str]], **alone_ms: float) -> GoldenRun:
    """With these parts on the ranks, each timed alone."""
    for table, names in zip(golden.manifest["topology"]["ranks"], parts, strict=True):
        table["parts"] = names
    return golden.set("standalone.parts_ns", {name: ms(t) for name, t in alone_ms.items()})


def chunks(reports: list[tuple[int, int, int]]) -> list[Fields]:
    """Reports of robots: age, steps executed, age of the oldest action."""
    names = ("age_ns", "executed", "oldest_ns")
    said = (dict(zip(names, report, strict=True)) for report in reports)
    return [{"kind": "robot", "session": 1, "seq": k} | one for k, one in enumerate(said)]


def slow_service() -> GoldenRun:
    golden = simulate(SLOW_INPUT, SPLIT, phase="ready", pacing="sample")
    golden.put(window_end_ns=ms(1), expires_ns=ms(101))
    return golden.put(at=slice(200, 202), drop="expired", age_rank0_ns=ms(120))
