"""Instructions: the texts that robots ask the policy to follow, each told to the policy once.

A text gets a number when it is first wanted; a row names that number only after the policy has
confirmed it, so no window ever names a text that the policy does not know. It speaks to nobody by
itself: ``tell`` takes the text to the policy, ``pop_changes`` says what changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ppstream.ingest.rows import RowInput

TEXTS_MAX: Final = 1024  # different texts of one run; the policy keeps all of them
FULL: Final = (
    f"robots have sent {TEXTS_MAX} different texts, the limit of one run: use one of those, or "
    "start the run again"
)


class InstructionChange(NamedTuple):
    """A row's instruction took effect, or could not (``fault``)."""

    session: int
    conditioning_epoch: int
    instruction_id: int
    text: str
    fault: str = ""


class _Wish(NamedTuple):
    session: int
    conditioning_epoch: int
    text: str


class Instructions:
    """Texts that rows want and have; for the thread that owns the rows, but for ``confirm``.

    Args:
        tell: takes a number and its text to the policy, which answers by ``confirm``, perhaps at
            once.
    """

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell = tell
        self._numbers: dict[str, int] = {}
        self._known: set[int] = {0}  # no text: there is nothing to know
        self._faults: dict[int, str] = {}
        self._wishes: dict[int, tuple[RowInput, _Wish]] = {}  # by session, the newest of each
        self._answers: deque[tuple[int, str]] = deque()
        self._changes: deque[InstructionChange] = deque()

    def request(self, row: RowInput, conditioning_epoch: int, text: str) -> bool:
        """``row`` shall follow ``text`` (empty: none); False: it is not newer than its last."""
        wished = self._wishes.get(row.session)
        newest = row.conditioning_epoch if wished is None else wished[1].conditioning_epoch
        if conditioning_epoch <= newest:
            return False
        wish = _Wish(row.session, conditioning_epoch, text)
        self._wishes[row.session] = (row, wish)
        number = self._number(text)
        if number is None:
            self._refuse(wish, FULL)
        elif number in self._faults:
            self._refuse(wish, self._faults[number])
        self._adopt()
        return True

    def is_open(self, session: int) -> bool:
        """True when the policy has not answered the newest text that the session asked for."""
        return session in self._wishes

    def confirm(self, number: int, fault: str = "") -> None:
        """The policy knows the text of ``number``, or why it cannot; from any thread."""
        self._answers.append((number, fault))

    def pop_changes(self) -> list[InstructionChange]:
        """Returns what changed since the last call; the rows have it already."""
        while self._answers:
            number, fault = self._answers.popleft()
            if fault:
                self._faults[number] = fault
            else:
                self._known.add(number)
            self._adopt()
        news = [*self._changes]
        self._changes.clear()
        return news

    def _number(self, text: str) -> int | None:
        """The text's number; one that is new goes to the policy. None: there are too many."""
        if not text:
            return 0
        number = self._numbers.get(text)
        if number is None and len(self._numbers) < TEXTS_MAX:
            number = self._numbers[text] = len(self._numbers) + 1
            self._tell(number, text)
        return number

    def _adopt(self) -> None:
        """Give every row that waits for a text what the policy has said since."""
        for row, wish in [*self._wishes.values()]:
            number = self._numbers.get(wish.text, 0)
            if row.session != wish.session:
                del self._wishes[wish.session]  # it left meanwhile
            elif number in self._faults:
                self._refuse(wish, self._faults[number])
            elif number in self._known:
                del self._wishes[wish.session]
                row.instruction_id, row.conditioning_epoch = number, wish.conditioning_epoch
                row.awaits_text = False
                self._changes.append(InstructionChange(*wish[:2], number, wish.text))

    def _refuse(self, wish: _Wish, fault: str) -> None:
        row, _ = self._wishes.pop(wish.session)
        row.conditioning_epoch = wish.conditioning_epoch  # an older wish must not come after it
        row.awaits_text = False
        self._changes.append(InstructionChange(*wish[:2], row.instruction_id, wish.text, fault))
