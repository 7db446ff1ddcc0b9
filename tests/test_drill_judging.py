import pytest
from drill_judging import Outcome, table
from drill_mutants import MUTANTS, ROOT, Mutant


def test_the_table_has_a_row_for_each_fault_and_says_which_missed():
    killed = Outcome("kill", "F20", "SIGKILL", "codes", notice_s=0.126, codes=(20, -9))
    killed.ledger, killed.oldest_ms = "balances", 61.4
    late = Outcome("late", "F21", "SIGSTOP", "codes", missed="gone after 9 s\nand more")
    assert table([killed, late]).splitlines() == [
        "| fault | noticed s | gone s | safe s | moves s | oldest ms | codes | ledger |",
        "|---|---|---|---|---|---|---|---|",
        "| `kill` | 0.13 |  |  |  | 61 | 20, -9 | balances |",
        "| `late` |  |  |  |  |  |  | MISSED: gone after 9 s |",
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_every_mutant_still_finds_the_line_it_changes(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
