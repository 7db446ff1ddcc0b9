import numpy as np
import pytest

from ppstream_stages.cartpole.layout import STREAMS
from ppstream_stages.cartpole.physics import CartPole, Reading


def run(body: CartPole, steps: int, force: float = 0.0) -> list[Reading]:
    return [sample for _ in range(steps) for sample in body.step(force)]


@pytest.mark.parametrize("seed", range(8))
def test_kicks_topple_it_open_loop_within_about_a_second(seed: int) -> None:
    body = CartPole(seed)
    body.release()
    run(body, 1200)
    assert body.fell_step is not None
    assert 0.3 < body.stood_ns / 1e9 <= 1.2


def test_without_kicks_and_actions_it_stands_longer_so_the_kicks_are_what_topples_it() -> None:
    body = CartPole(0, kicks=False)
    body.release()
    run(body, 1200)
    assert body.fell_step is None


def test_the_fixture_holds_it_whatever_the_actions_are() -> None:
    body = CartPole(0)
    run(body, 1000, force=15.0)
    assert np.abs(body.state).max() < 1e-3
    assert body.fell_step is None
    assert body.stood_ns == 0


def test_the_fixture_brings_a_nudged_pole_back() -> None:
    body = CartPole(0)
    body.data.qvel[:] = (0.5, 1.0)
    run(body, 500)
    assert np.abs(body.state).max() < 1e-2


def test_the_same_seed_gives_the_same_life_and_another_seed_another() -> None:
    lives = []
    for seed in (3, 3, 4):
        body = CartPole(seed)
        body.release()
        lives.append(([s.values.tolist() for s in run(body, 600)], body.state.tolist()))
    assert lives[0] == lives[1]
    assert lives[0] != lives[2]


def test_streams_come_at_their_rates_with_jittered_increasing_stamps() -> None:
    samples = run(CartPole(0), 3000)
    for index, stream in enumerate(STREAMS):
        stamps = np.array([s.stamp_ns for s in samples if s.stream == index])
        gaps_ms = np.diff(stamps) / 1e6
        assert (gaps_ms > 0).all()
        assert gaps_ms.mean() == pytest.approx(stream.period_ms, rel=0.02)
        assert gaps_ms.std() > 0.05


def test_noise_is_as_declared() -> None:
    samples = run(CartPole(0), 4000)
    for index, stream in enumerate(STREAMS[:2]):
        values = np.stack([s.values for s in samples if s.stream == index][100:])
        assert np.allclose(values.std(axis=0), stream.noise, rtol=0.15)
