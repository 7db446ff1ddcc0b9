import json

from drill.live_logs import NOTHING_SENT, TAIL_MAX, imbalance, imbalances, parsed, whole_lines


def ledger(**changes):
    entry = {"received": 9, "used": 5, "dropped": {"late": 3}, "in_flight": 1} | changes
    return {"kind": "ledger", "streams": {"imu": entry}, "envelopes": entry}


def envelope(kind, seq):
    return {"kind": kind, "epoch": 0, "seq": seq}


FRONT = [ledger(), *(envelope("envelope", seq) for seq in range(20))]
BACK = [envelope("stage1", seq) for seq in range(20)]


def test_logs_that_agree_balance():
    assert imbalance(FRONT, BACK) == ""
    newest = [envelope("stage1", 20 + at) for at in range(TAIL_MAX)]
    assert imbalance(FRONT, [*BACK, *newest]) == ""
    assert "(0, 20)" in imbalance(FRONT, [*BACK, *newest, envelope("stage1", 20 + TAIL_MAX)])


def test_a_lost_sample_or_envelope_is_seen():
    assert "imu" in imbalance([ledger(used=4)], [])
    assert "answered twice" in imbalance(FRONT, [*BACK, BACK[0]])
    for lost in (3, 18):  # also one of the newest, with a later one in the log
        without = [line for line in FRONT if line.get("seq") != lost]
        assert f"(0, {lost})" in imbalance(without, BACK)


def test_a_log_that_is_still_written_is_read_to_its_last_whole_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"b"')
    lines, end = whole_lines(path, 0)
    assert [parsed(line) for line in lines] == [{"a": 1}]
    assert whole_lines(path, end) == ([], end)
    assert parsed(b'{"b"') == {"kind": "torn"}


def write(folder, rank, generation, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"rank{rank}.gen{generation}.jsonl").write_text(text)


def test_every_generation_must_balance(tmp_path):
    for generation in (0, 1):
        write(tmp_path, 0, generation, FRONT)
        write(tmp_path, 1, generation, BACK)
    assert imbalances(tmp_path) == ""
    write(tmp_path, 0, 1, [ledger(used=4), *FRONT[1:]])
    assert imbalances(tmp_path).startswith("rank0.gen1.jsonl: imu")


def test_a_run_that_sent_nothing_says_so_and_one_without_a_ledger_is_no_proof(tmp_path):
    assert imbalances(tmp_path / "none") == NOTHING_SENT
    write(tmp_path, 0, 0, [{"kind": "event", "name": "metrics"}])
    assert imbalances(tmp_path) == NOTHING_SENT
    write(tmp_path, 0, 0, FRONT[1:])
    assert "no ledger" in imbalances(tmp_path)
