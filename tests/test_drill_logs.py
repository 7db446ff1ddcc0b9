from drill_logs import imbalance, parsed, whole_lines


def ledger(**changes):
    entry = {"received": 9, "used": 5, "dropped": {"late": 3}, "in_flight": 1} | changes
    return {"kind": "ledger", "streams": {"imu": entry}, "envelopes": entry}


def envelope(kind, seq):
    return {"kind": kind, "epoch": 0, "seq": seq}


FRONT = [ledger(), *(envelope("envelope", seq) for seq in range(20))]
BACK = [envelope("stage1", seq) for seq in range(20)]


def test_logs_that_agree_balance():
    assert imbalance(FRONT, BACK) == ""
    newest_still_in_flight = [*BACK, envelope("stage1", 20)]
    assert imbalance(FRONT, newest_still_in_flight) == ""


def test_a_lost_sample_or_envelope_is_seen():
    assert "imu" in imbalance([ledger(used=4)], [])
    assert "answered twice" in imbalance(FRONT, [*BACK, BACK[0]])
    without_third = [line for line in FRONT if line.get("seq") != 3]
    assert "(0, 3)" in imbalance(without_third, BACK)


def test_a_log_that_is_still_written_is_read_to_its_last_whole_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"a": 1}\n{"b"')
    lines, end = whole_lines(path, 0)
    assert [parsed(line) for line in lines] == [{"a": 1}]
    assert whole_lines(path, end) == ([], end)
    assert parsed(b'{"b"') == {"kind": "torn"}
