import numpy as np
import pytest

from ppstream.config.load import read
from ppstream.policy.protocol import load_target
from ppstream_stages.cartpole import plant
from ppstream_stages.cartpole.decode import PredictiveDecoder, build
from ppstream_stages.cartpole.layout import FORCE_MAX_N, HORIZON
from ppstream_stages.cartpole.train import planned, teacher_gain

VIEWS = 8
LEANING = np.array([0.0, 0.08, 0.0, 0.1])


@pytest.fixture(scope="module")
def decoder() -> PredictiveDecoder:
    return build({}, read("demo").actions)


def decode(decoder: PredictiveDecoder, state: np.ndarray, proposals: np.ndarray) -> np.ndarray:
    actions = np.full((HORIZON, 1), np.nan, np.float32)
    result = {"state": np.float32(state), "proposals": np.float32(proposals)[:, :, None]}
    decoder(0, result, actions)
    return actions[:, 0]


def test_the_demo_names_this_decoder() -> None:
    assert load_target(read("demo").decode.target) is build


def test_the_lqrs_own_plan_is_predicted_to_cost_less_than_others(
    decoder: PredictiveDecoder,
) -> None:
    plan = planned(LEANING, teacher_gain())
    costs = decoder.costs(LEANING, np.stack((plan, plan * 0, -plan, plan * 1.5)))
    assert costs.argmin() == 0
    assert costs[1] > 1.5 * costs[0]
    assert costs[2] > costs[1]


def test_bad_proposals_hardly_count_beside_a_good_one(decoder: PredictiveDecoder) -> None:
    good = planned(LEANING, teacher_gain())
    proposals = np.stack((good, *(-good for _ in range(VIEWS - 1))))
    actions = decode(decoder, LEANING, proposals)
    assert np.abs(actions - good).max() < 0.3 * np.abs(good).max()
    assert actions[0] * proposals.mean(axis=0)[0] < 0  # the plain mean would push the wrong way


def test_equal_proposals_come_back_nearly_unchanged(decoder: PredictiveDecoder) -> None:
    good = planned(LEANING, teacher_gain())
    actions = decode(decoder, LEANING, np.tile(good, (VIEWS, 1)))
    assert np.allclose(actions, good, rtol=0.06)


def test_actions_stay_within_the_limits_whatever_is_proposed(decoder: PredictiveDecoder) -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        proposals = random.normal(0, 100, (VIEWS, HORIZON))
        actions = decode(decoder, random.normal(0, 0.2, 4), proposals)
        assert np.isfinite(actions).all()
        assert np.abs(actions).max() <= FORCE_MAX_N


def test_the_prediction_is_the_plants_own_motion(decoder: PredictiveDecoder) -> None:
    # one constant force: the cost must be that of stepping the plant by hand
    force, steps = 3.0, HORIZON * 5
    state, cost = LEANING[None], plant.FORCE_COST * force**2 * steps
    for _ in range(steps):
        state = plant.advance(state, np.array([force]), 1e-3)
        cost += float((state[0] ** 2) @ plant.STATE_COST)
    value = plant.lqr(*plant.linearise(1e-3))[1]
    cost += float(state[0] @ value @ state[0])
    ours = decoder.costs(LEANING, np.full((1, HORIZON), force))
    assert ours[0] == pytest.approx(cost)


def test_a_policy_that_returns_nan_is_not_hidden(decoder: PredictiveDecoder) -> None:
    actions = decode(decoder, LEANING, np.full((VIEWS, HORIZON), np.nan))
    assert np.isnan(actions).any()  # so that the loop behind it drops the chunk
