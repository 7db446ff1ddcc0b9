from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from stream_cases import MS, Input, at_ms, config, ramp, stream

from ppstream.config.schema import ImageConfig
from ppstream.ingest.device.sample_blocks import (
    COMMITMENT_WORDS,
    GUARD,
    HEADER_WORDS,
    NEWEST,
    PIECE_WORDS,
    RING_WORDS,
    ROW_WORDS,
    WORD_BYTES,
    BlockWriter,
)
from ppstream.ingest.device.window_records import WindowBook
from ppstream.ingest.rows import Commitment, Need
from ppstream.ingest.window import WindowInfo

torch.set_num_threads(1)


class Twin:
    """The rings as the GPU would hold them: what ``rings.cu`` does, in numpy."""

    def __init__(self, case: Input) -> None:
        self.case = case
        self.writer = BlockWriter(case.rows, case.banks, case.config.reference.name)
        self.block = np.full(self.writer.block_words, -7, np.int64)
        self.stamps = {
            name: np.full((len(case.rows), GUARD * bank.capacity), -7, np.int64)
            for name, bank in case.banks.items()
        }
        self.values = {
            name: np.full((*self.stamps[name].shape, bank.stream.dim), np.nan, np.float32)
            for name, bank in case.banks.items()
        }
        self.table: NDArray[np.int64] = np.zeros(self.writer.table_words, np.int64)
        self.sequence = 0

    def ingest(self, *ends_ns: int | None) -> int:
        """Take over all that is new; returns how many blocks it took."""
        blocks = 0
        ends = ends_ns or (None,) * len(self.case.rows)
        is_all = False
        while not is_all:
            words, _, is_all = self.writer.write(self.block, self.sequence + 1, ends)
            if words:
                blocks += 1
                self._take_over()
                self.check()
        assert not self.writer.write(self.block, self.sequence + 1, ends).words
        return blocks

    def _take_over(self) -> None:
        self.sequence, pieces = self.block[:HEADER_WORDS].tolist()
        behind = HEADER_WORDS + self.writer.table_words
        self.table = self.block[HEADER_WORDS:behind].copy()
        names = list(self.case.banks)
        for piece in range(pieces):
            begin = behind + piece * PIECE_WORDS
            s, row, number, n, at = self.block[begin : begin + PIECE_WORDS].tolist()
            stamps, values = self.stamps[names[s]], self.values[names[s]]
            slots = (number + np.arange(n)) % stamps.shape[1]
            words = self.block[at // WORD_BYTES :]
            stamps[row, slots] = words[:n]
            dim = values.shape[2]
            values[row, slots] = words[n:].view(np.float32)[: n * dim].reshape(n, dim)

    def check(self) -> None:
        """After every block, also in the middle of a backlog: a table names what is there."""
        for name in self.case.banks:
            for row in range(len(self.case.rows)):
                stamps, values = self.usable(name, row)
                assert (stamps >= 0).all()
                assert np.isfinite(values).all()

    def usable(self, name: str, row: int = 0) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Stamps and values that a window may use, oldest first."""
        rows = len(self.case.rows)
        at = len(ROW_WORDS) * rows + len(RING_WORDS) * (
            list(self.case.banks).index(name) * rows + row
        )
        sent, count, _ = self.table[at : at + len(RING_WORDS)].tolist()
        slots = np.arange(sent - count, sent) % self.stamps[name].shape[1]
        return self.stamps[name][row, slots], self.values[name][row, slots]


def test_a_block_that_repeats_the_newest_samples_changes_nothing() -> None:
    case = Input(config(stream("a", dim=2, reference=True), stream("b", dim=1)), 8)
    twin, row = Twin(case), case.rows[0]
    row.open(7)
    twin.writer.repeat()
    assert twin.ingest() == 1  # who sits there: no ring holds anything
    for number in range(11):
        for name in case.banks:
            stamps = at_ms(number)
            row.rings[name].append(stamps, ramp(stamps, dim=row.rings[name].stream.dim), 0)
    twin.ingest()
    before = twin.table.tolist(), *[each.tobytes() for each in twin.stamps.values()]
    twin.writer.repeat()
    assert twin.ingest() == 1
    assert (twin.table.tolist(), *[each.tobytes() for each in twin.stamps.values()]) == before
    stamps = at_ms(20)
    row.rings["a"].append(stamps, ramp(stamps), 0)
    twin.writer.repeat()  # of the others
    assert twin.ingest() == 1
    assert twin.usable("a")[0].tolist() == held(case, "a").tolist()


def held(case: Input, name: str, row: int = 0) -> NDArray[np.int64]:
    ring, bank = case.rows[row].rings[name], case.banks[name]
    numbers = np.arange(ring.accepted - ring.count, ring.accepted) % bank.capacity
    return bank.stamps_ns[row].numpy()[numbers]


def push(case: Input, name: str, *times: float, row: int = 0, rx_ns: int = 0) -> None:
    stamps = at_ms(*times)
    ring = case.rows[row].rings[name]
    assert ring.append(stamps, ramp(stamps, ring.stream.dim), rx_ns) == len(stamps)


def open_case(*streams: Any, capacity: int | None = None, rows: int = 1, **more: Any) -> Input:
    case = Input(config(*streams, rows=rows, **more), capacity)
    for row, place in enumerate(case.rows):
        place.open(row + 7)
    return case


def test_only_new_samples_travel_and_nothing_new_sends_nothing() -> None:
    case = open_case(stream("q", dim=3), stream("tip", dim=1, rate_hz=30))
    twin = Twin(case)
    push(case, "q", 1, 2, 3)
    push(case, "tip", 2)
    assert twin.ingest() == 1
    assert twin.ingest() == 0
    first = twin.block[:HEADER_WORDS].tolist()
    push(case, "q", 4)
    assert twin.ingest() == 1
    assert (first, twin.block[:HEADER_WORDS].tolist()) == ([1, 2], [2, 1])
    stamps, values = twin.usable("q")
    assert stamps.tolist() == at_ms(1, 2, 3, 4).tolist()
    np.testing.assert_array_equal(values, ramp(stamps, 3))


def test_a_wrapped_ring_arrives_in_order() -> None:
    case = open_case(stream("q", dim=3), capacity=5)
    twin = Twin(case)
    for begin in range(0, 40, 4):
        push(case, "q", *range(begin, begin + 4))
        twin.ingest()
        stamps, values = twin.usable("q")
        assert stamps.tolist() == held(case, "q").tolist()
        np.testing.assert_array_equal(values, ramp(stamps, 3))


def test_what_a_table_names_survives_as_many_samples_again() -> None:
    case = open_case(stream("q", dim=1), capacity=8)
    twin = Twin(case)
    push(case, "q", *range(8))
    twin.ingest()
    table = twin.table.copy()
    push(case, "q", *range(8, 16))
    twin.ingest()
    twin.table = table  # a window began before the second block
    assert twin.usable("q")[0].tolist() == at_ms(*range(8)).tolist()


def test_a_backlog_takes_several_blocks_and_loses_nothing() -> None:
    case = open_case(stream("wide", dim=4096), capacity=120)
    twin = Twin(case)
    push(case, "wide", *range(100))
    assert twin.ingest() > 1
    stamps, values = twin.usable("wide")
    assert len(stamps) == 100
    np.testing.assert_array_equal(values, ramp(stamps, 4096))


def test_a_new_episode_empties_the_table_at_once() -> None:
    case = open_case(stream("q", dim=1))
    twin = Twin(case)
    push(case, "q", 1, 2)
    twin.ingest()
    case.rows[0].new_episode()
    assert twin.ingest() == 1
    assert twin.usable("q")[0].size == 0
    assert twin.table[: len(ROW_WORDS)].tolist()[:3] == [7, 1, NEWEST]
    push(case, "q", 3)
    twin.ingest()
    assert twin.usable("q")[0].tolist() == [3 * MS]


def test_a_ring_that_is_emptied_within_an_episode_is_emptied_there_too() -> None:
    case = open_case(stream("q", dim=1))
    twin = Twin(case)
    push(case, "q", 1, 2)
    twin.ingest()
    case.rows[0].rings["q"].clear("clock_jump")
    assert twin.ingest() == 1
    assert twin.usable("q")[0].size == 0


def test_frames_travel_beside_the_block_and_their_stamps_in_it() -> None:
    image = ImageConfig(height=2, width=3)
    case = open_case(
        stream("q", dim=1), stream("front", dim=0, rate_hz=30, image=image), capacity=6
    )
    writer = BlockWriter(case.rows, case.banks, "q")
    push(case, "q", 5)
    ring = case.rows[0].rings["front"]
    assert ring.append(at_ms(1, 2), np.zeros((2, 18), np.uint8), 0) == 2
    words, frames, is_all = writer.write(np.zeros(writer.block_words, np.int64), 1, [None])
    assert is_all
    assert [tuple(frame) for frame in frames] == [(1, 0, 0), (1, 0, 1)]
    assert words == writer.block_words - 2 * 6 - 6 + 2 + 2  # of 6 q and 6 frames, 1 and 2 travel
    writer.repeat()  # not of frames: their pixels may be gone
    words, frames, _ = writer.write(np.zeros(writer.block_words, np.int64), 2, [None])
    assert words
    assert frames == []


EVENTS = ["a", "b", "episode", "repeat", "ingest", "leave", "come"]


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 9), st.integers(0, 1)), max_size=60)
)
def test_the_twin_always_holds_the_newest_after_an_ingest(
    events: list[tuple[str, int, int]],
) -> None:
    case = open_case(stream("a", dim=2), stream("b", dim=1, rate_hz=100), capacity=7, rows=2)
    twin, now, sessions = Twin(case), 0, 100
    for what, count, row in events:
        place = case.rows[row]
        if what == "episode" and place.session:
            place.new_episode()
        elif what == "leave":
            place.close()
        elif what == "come" and place.session == 0:
            sessions += 1
            place.open(sessions)
        elif what == "repeat":
            twin.writer.repeat()
        elif what == "ingest":
            twin.ingest()
            check_the_twin(twin)
        elif what in ("a", "b") and place.session:
            stamps = at_ms(*range(now, now + count))
            place.rings[what].append(stamps, ramp(stamps, place.rings[what].stream.dim), 0)
            now += count


def check_the_twin(twin: Twin) -> None:
    case = twin.case
    for row, place in enumerate(case.rows):
        words = twin.table[row * len(ROW_WORDS) :][:2].tolist()
        assert words == [place.session, place.session_epoch]
        for name in case.banks:
            stamps, values = twin.usable(name, row)
            assert stamps.tolist() == held(case, name, row).tolist()
            np.testing.assert_array_equal(values, ramp(stamps, values.shape[1]))


def test_what_a_robot_executes_travels_once_and_its_end_too() -> None:
    case = open_case(stream("q", dim=1), rows=2)
    writer = BlockWriter(case.rows, case.banks, "q", (4, 3))
    block = np.full(writer.block_words, -7, np.int64)
    actions = np.arange(6 * 3, dtype=np.float32).reshape(6, 3)
    case.rows[1].commitment = Commitment(10, 20, 30, 40, actions)
    assert writer.write(block, 1, (None, None)).words
    at = HEADER_WORDS + writer.told_words
    assert block[at] == 0  # the first row executes nothing that is known
    second = block[at + writer.commitment_words : at + 2 * writer.commitment_words]
    assert second[:COMMITMENT_WORDS].tolist() == [4, 10, 20, 30, 40]
    sent = second[COMMITMENT_WORDS:].view(np.float32)[:12].reshape(4, 3)
    np.testing.assert_array_equal(sent, actions[:4])
    assert not writer.write(block, 2, (None, None)).words
    case.rows[1].commitment = None
    assert writer.write(block, 2, (None, None)).words
    assert block[at + writer.commitment_words] == 0


# ---- what a window used, read back late -------------------------------------------------------


def test_a_window_read_late_books_only_what_it_could_use() -> None:
    case = open_case(stream("q", dim=1), stream("slow", dim=1, rate_hz=30), steps=2, dt_ms=10)
    twin = Twin(case)
    push(case, "q", *range(0, 41, 5), rx_ns=3)
    push(case, "slow", 4, 34)
    twin.ingest()
    words = twin.table.tolist()
    push(case, "slow", 39)  # before the window's end, but after the window began
    push(case, "q", 45, rx_ns=4)
    taken = WindowBook(case.config, case.rows, 0).account(words)
    assert taken.info.window_end_ns == [40 * MS]
    assert taken.info.newest_rx_ns == 3
    assert taken.info.input_age_ns == {"q": 0, "slow": 6 * MS}
    assert taken.present == [True]
    assert taken.episodes == [(7, 0)]
    assert taken.received_ns == [3]
    assert case.rows[0].rings["slow"].ledger.in_flight == 1
    assert case.rows[0].rings["q"].ledger.in_flight == 1
    case.check()


def test_a_given_end_leaves_newer_samples_in_flight() -> None:
    case = open_case(stream("q", dim=1), steps=2, dt_ms=10)
    twin = Twin(case)
    push(case, "q", *range(50))
    twin.ingest(30 * MS)
    taken = WindowBook(case.config, case.rows, 0).account(twin.table.tolist())
    assert taken.info.window_end_ns == [30 * MS]
    ledger = case.rows[0].reference.ledger
    assert (ledger.used, ledger.in_flight, ledger.dropped) == (11, 19, {"passed_over": 20})
    case.check()


def test_a_window_of_an_episode_that_is_over_books_nothing_of_the_next() -> None:
    case = open_case(stream("q", dim=1), rows=2)
    twin = Twin(case)
    push(case, "q", 10, 20)
    twin.ingest()
    words = twin.table.tolist()
    case.rows[0].new_episode()
    push(case, "q", 5)  # older than the window's end
    taken = WindowBook(case.config, case.rows, 0).account(words)
    assert taken.info.window_end_ns == [20 * MS, 0]
    assert taken.present == [True, False]
    assert taken.info.input_age_ns == {"q": [0, None]}
    assert case.rows[0].reference.ledger.in_flight == 1
    case.check()


def test_a_window_leaves_out_who_is_behind_its_limit_and_a_later_one_books_it() -> None:
    case = open_case(stream("q", dim=1), rows=3)
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    for row in (0, 2):
        push(case, "q", 10, 20, row=row, rx_ns=5 + row)
    twin.ingest()
    words = twin.table.tolist()
    few, all_of_them = book.account(words, 2), book.account(words, 3)
    assert few.present == [True, False, False]
    assert few.info == WindowInfo([20 * MS, 0, 0], 5, {"q": [0, None, None]})
    assert few.episodes == all_of_them.episodes  # whose rows they are is told all the same
    assert all_of_them.present == [True, False, True]
    assert all_of_them.info.newest_rx_ns == 7
    assert case.rows[2].reference.ledger.in_flight == 0
    case.check()


def test_a_row_that_awaits_its_text_shows_no_samples_until_it_has_it() -> None:
    case = open_case(stream("q", dim=1), rows=2)
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    for row in (0, 1):
        push(case, "q", 10, 20, row=row)
    case.rows[1].awaits_text = True
    twin.ingest()
    taken = book.account(twin.table.tolist())
    assert taken.present == [True, False]
    assert taken.info.input_age_ns == {"q": [0, None]}
    assert len(twin.usable("q", 1)[0]) == 0
    case.rows[1].awaits_text = False
    assert twin.ingest() == 1  # no sample has come, and yet there is something to tell
    assert twin.usable("q", 1)[0].tolist() == [10 * MS, 20 * MS]
    assert book.account(twin.table.tolist()).present == [True, True]
    case.check()


def needing(rows: int, capacity: int | None = None) -> Input:
    """Each row needs ``b``, at most 50 ms older than ``a``."""
    case = Input(
        config(stream("a", dim=2, reference=True), stream("b", dim=1), rows=rows),
        capacity,
        needs={"b": Need(50 * MS)},
    )
    for number, row in enumerate(case.rows):
        row.open(1 + number)
    return case


def test_a_row_that_lacks_what_the_policy_needs_shows_no_samples_until_it_has_it() -> None:
    case = needing(rows=2)
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    for row in (0, 1):
        push(case, "a", 10, row=row)
    push(case, "b", 10)
    push(case, "b", 11, row=1)  # behind the window's end
    twin.ingest()
    assert [row.present for row in case.rows] == [True, False]
    assert book.account(twin.table.tolist()).present == [True, False]
    push(case, "a", 11, row=1)
    twin.ingest()
    assert book.account(twin.table.tolist()).present == [True, True]
    push(case, "a", 62, row=1)
    twin.ingest()
    assert book.account(twin.table.tolist()).present == [True, False]
    case.check()


@pytest.mark.parametrize(
    ("end", "present"),
    [(19, False), (20, True), (70, True), (71, False)],  # the reference stays at 10
)
def test_a_given_end_is_where_a_row_has_what_the_policy_needs_on_either_side(
    end: int, *, present: bool
) -> None:
    case = needing(rows=1)
    twin = Twin(case)
    push(case, "a", 10)
    push(case, "b", 20)
    twin.ingest(end * MS)
    taken = WindowBook(case.config, case.rows, 0).account(twin.table.tolist())
    out = case.slot()
    info = case.cutter.cut(out, [end * MS], 0)
    assert taken.present == out["present"].tolist() == [present]
    assert taken.info.window_end_ns == info.window_end_ns == [end * MS * present]


def test_amid_a_backlog_a_row_that_needs_a_stream_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ppstream.ingest.device.sample_blocks.BLOCK_BYTES", 64)
    case, tables = needing(rows=1), []
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    push(case, "a", *range(1, 21))
    push(case, "b", *range(1, 21))
    monkeypatch.setattr(twin, "check", lambda: tables.append(twin.table.tolist()))
    assert twin.ingest() > 2
    shown = [book.account(table).present for table in tables]
    assert shown == [[False]] * (len(tables) - 1) + [[True]]
    case.check()


def test_a_backlog_of_one_robot_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppstream.ingest.device.sample_blocks.BLOCK_BYTES", 64)
    case, tables = needing(rows=2), []
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    for name in ("a", "b"):
        push(case, name, 1)
        push(case, name, *range(1, 21), row=1)
    monkeypatch.setattr(twin, "check", lambda: tables.append(twin.table.tolist()))
    assert twin.ingest() > 2
    shown = [book.account(table).present for table in tables]
    assert shown == [[True, False]] * (len(tables) - 1) + [[True, True]]
    case.check()


def test_a_ring_is_settled_once_for_what_several_windows_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = open_case(stream("q", dim=1), stream("slow", dim=1, rate_hz=30), steps=2, dt_ms=10)
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    slow, settled = case.rows[0].rings["slow"], []
    settle = slow.settle
    monkeypatch.setattr(slow, "settle", lambda *times: settled.append(times) or settle(*times))
    push(case, "slow", 4)
    ages = []
    for at in (10, 20, 30):
        push(case, "q", at)
        twin.ingest()
        ages.append(book.account(twin.table.tolist()).info.input_age_ns["slow"])
    assert ages == [6 * MS, 16 * MS, 26 * MS]
    assert len(settled) == 1
    assert slow.ledger.used == 1
    case.check()


@pytest.mark.parametrize("steps", [1, 2])
def test_samples_that_come_before_the_window_is_popped_are_the_next_ones(steps: int) -> None:
    """They may lie before its first target: those of a sensor that lags, or any with one step."""
    imu = stream("imu", dim=1, rate_hz=500)
    case = open_case(stream("q", dim=1), imu, steps=steps, dt_ms=10)
    twin, book = Twin(case), WindowBook(case.config, case.rows, 0)
    push(case, "imu", *range(70, 80, 2))
    for at in range(100, 160, 10):
        push(case, "q", at)
        twin.ingest()
        words = twin.table.tolist()
        push(case, "imu", *range(at - 20, at - 10, 2))
        assert book.account(words).info.input_age_ns["imu"] == 22 * MS
    ledger = case.rows[0].rings["imu"].ledger
    assert (ledger.used, ledger.dropped, ledger.in_flight) == (6, {"passed_over": 24}, 5)
    case.check()
