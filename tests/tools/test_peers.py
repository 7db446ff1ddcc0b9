"""The comparison with peers: what it counts, what it skips, and how it judges; no measurement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench import cores, peers, peers_environments
from bench.peers import AT_50_HZ, OPENPI, REP, TWO, AskingProcess, PeerBench, PeerResult

BURN_S = 0.2
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"


def session(folder: Path, *options: str) -> PeerBench:
    return PeerBench(peers.options_of(["--peers", REP, *options]), folder)


def test_a_robot_asks_a_server_and_gets_every_answer(tmp_path: Path) -> None:
    here = session(tmp_path)
    with (
        peers.serving(here, REP, "mlp") as address,
        AskingProcess(here, REP, address, "mlp") as robot,
    ):
        taken_us = robot.order(measure="latencies", times=7, warm=2, rate_hz=1000.0)
        one_us, four_us = (
            robot.order(measure="period", times=20, warm=1, in_flight=n) for n in (1, 4)
        )
    assert len(taken_us) == 7
    assert min(one_us, four_us, *taken_us) > 0
    assert set(here.versions) == {"pyzmq", "msgspec", "numpy"}


def test_a_server_that_ends_is_said(tmp_path: Path) -> None:
    here = session(tmp_path)
    with (
        pytest.raises(peers.NotServed, match=r"ended with 1"),
        peers.serving(here, REP, "no such work"),
    ):
        pass


def test_a_peer_whose_environment_cannot_be_made_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPSTREAM_CLIENTS", str(tmp_path / "clients"))
    monkeypatch.setattr(peers_environments.sys, "executable", str(tmp_path / "nothing"))
    here = session(tmp_path, OPENPI)
    assert list(here.skipped) == [OPENPI]
    assert "No such file" in here.skipped[OPENPI]
    assert OPENPI not in here.pythons


def test_an_environment_that_is_complete_is_taken_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / peers_environments.pin_of("strands-robots").replace("==", "-")
    place.mkdir()
    (place / peers_environments.COMPLETE).touch()
    assert peers_environments.python_with("strands-robots", tmp_path) == place / "bin" / "python"


def test_an_environment_that_shares_ours_sees_this_interpreters_whoever_made_it(
    tmp_path: Path,
) -> None:
    place = tmp_path / peers_environments.pin_of("lerobot").replace("==", "-")
    theirs = place / "lib/python3.11/site-packages"
    theirs.mkdir(parents=True)
    (theirs / "shared.pth").write_text("/a/checkout/that/is/gone\n")
    (place / peers_environments.COMPLETE).touch()
    peers_environments.python_with("lerobot", tmp_path)
    ours = Path(pytest.__file__).parents[1]
    assert Path((theirs / "shared.pth").read_text().strip()).samefile(ours)


def test_a_target_is_judged_by_the_median_of_ratios_within_a_round() -> None:
    ours, theirs = (100.0, 600.0, 300.0), (100.0, 200.0, 200.0)
    found = [
        PeerResult(number, AT_50_HZ, peer, us, us, 0.0)
        for peer, each in ((TWO, ours), (REP, theirs))
        for number, us in enumerate(each)
    ]
    targets, claims = peers.judged([*found, PeerResult(3, AT_50_HZ, TWO, 9e9, 9e9, 0.0)])
    assert [(target.limit, target.reached) for target in targets] == [(1.2, 1.5), (1.3, 1.5)]
    assert [claim["numbers"] for claim in claims] == [{"of": 300.0, "over": 200.0}] * 2


def test_time_of_what_we_started_is_not_foreign() -> None:
    before = cores.own_ticks()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert cores.own_ticks() - before >= 0.9 * BURN_S * cores.TICKS_HZ


def test_time_of_anything_else_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process than ours is one that does not descend from the one that counts."""
    counted = cores.Cores()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    monkeypatch.setattr(cores, "own_ticks", lambda: counted.began[2])
    assert counted.foreign() > 0


def test_three_cameras_through_a_policy_that_takes_no_time_are_overhead_alone() -> None:
    found = [
        PeerResult(number, peers.FRAMES, peer, us, 9e6, 0.0)
        for peer, all_us in ((peers.WIRED, (900.0, 1500.0, 800.0)), (peers.TWO, (500.0,)))
        for number, us in enumerate(all_us)
    ]
    wired, native = peers.judged(found)[0]
    assert (wired.reached, wired.limit, wired.met) == (0.9, 1.0, True)
    assert (native.reached, native.limit, native.met) == (0.5, 0.4, False)
