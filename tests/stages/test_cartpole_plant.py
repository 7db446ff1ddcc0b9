import mujoco
import numpy as np

from ppstream_stages.cartpole import plant
from ppstream_stages.cartpole.physics import CartPole
from ppstream_stages.cartpole.train import teacher_gain

STEP_S = 1e-3


def test_the_numpy_model_moves_like_the_body() -> None:
    body = CartPole(0, kicks=False)
    body.release()
    body.data.qpos[:], body.data.qvel[:] = (0.1, 0.2), (0.3, -0.5)
    state = body.state[None]
    forces = np.random.default_rng(0).uniform(-10, 10, 100)
    for force in forces:
        body.step(force)
        state = plant.advance(state, np.array([force]), STEP_S)
    assert np.abs(body.state - state[0]).max() < 5e-4


def test_many_states_advance_as_each_alone() -> None:
    random = np.random.default_rng(1)
    states, forces = random.normal(0, 0.3, (7, 4)), random.normal(0, 5, 7)
    together = plant.advance(states, forces, STEP_S)
    alone = [plant.advance(states[i : i + 1], forces[i : i + 1], STEP_S)[0] for i in range(7)]
    assert np.array_equal(together, np.stack(alone))


def test_the_linearisation_agrees_with_mujocos() -> None:
    body = CartPole(0)
    body.release()
    mujoco.mj_forward(body.model, body.data)
    a, b = np.zeros((4, 4)), np.zeros((4, 1))
    mujoco.mjd_transitionFD(body.model, body.data, 1e-6, True, a, b, None, None)
    ours = plant.linearise(STEP_S)
    assert np.allclose(ours[0], a, atol=5e-5)
    assert np.allclose(ours[1], b, atol=1e-5)


def test_the_gain_makes_the_unstable_pole_stable() -> None:
    a, b = plant.linearise(STEP_S)
    gain, value = plant.lqr(a, b)
    assert np.abs(np.linalg.eigvals(a)).max() > 1.001
    assert np.abs(np.linalg.eigvals(a - b @ gain)).max() < 0.999
    assert np.allclose(value, value.T)
    assert np.linalg.eigvalsh(value).min() > 0
    assert np.allclose(gain[0], teacher_gain(), rtol=1e-3)
