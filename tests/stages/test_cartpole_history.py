import numpy as np
import torch

from ppstream.config.load import read
from ppstream.config.schema import PipelineConfig
from ppstream.ingest.intake import build_intake
from ppstream_stages.cartpole.history import History
from ppstream_stages.cartpole.layout import STREAMS, WINDOW_DT_NS, WINDOW_STEPS
from ppstream_stages.cartpole.physics import CartPole, Reading


def life(seed: int, steps: int) -> list[Reading]:
    body = CartPole(seed)
    body.release()
    return [sample for _ in range(steps) for sample in body.step(0.0)]


def demo() -> PipelineConfig:
    return read("demo")


def test_a_window_is_the_one_the_runtime_cuts_from_the_same_samples() -> None:
    samples = life(seed=5, steps=333)
    history = History(capacity=16)  # grows on the way
    history.extend(samples)
    intake = build_intake(demo())
    row = intake.rows[0]
    row.open(session=1)
    for sample in samples:
        stamps = np.array([sample.stamp_ns], dtype=np.int64)
        ring = row.rings[STREAMS[sample.stream].name]
        assert ring.append(stamps, sample.values[None], sample.stamp_ns) == 1
    out = {
        spec.name: torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype))
        for spec in intake.cutter.inputs
    }
    intake.cutter.cut(out, [None], 1)
    ours = history.window(history.newest_ns)
    assert np.allclose(ours.values, out["state.values"][0].numpy(), atol=1e-6)
    assert np.array_equal(ours.valid, out["state.valid"][0].numpy())
    assert np.allclose(ours.age_s, out["state.age_s"][0].numpy(), atol=1e-6)
    assert ours.valid.all()


def test_a_window_knows_nothing_captured_after_its_end() -> None:
    samples = life(seed=6, steps=400)
    whole, cut = History(), History()
    whole.extend(samples)
    end_ns = 250_400_000
    cut.extend(sample for sample in samples if sample.stamp_ns <= end_ns)
    for ours, theirs in zip(whole.window(end_ns), cut.window(end_ns), strict=True):
        assert np.array_equal(ours, theirs)


def test_steps_before_the_first_sample_are_not_valid() -> None:
    history = History()
    history.extend(life(seed=7, steps=40))
    valid = history.window(history.newest_ns).valid[:, 0]
    known = round(history.newest_ns / WINDOW_DT_NS)
    assert not valid[: WINDOW_STEPS - known - 1].any()
    assert valid[WINDOW_STEPS - known + 1 :].all()


def test_without_samples_nothing_is_valid() -> None:
    window = History().window(10**9)
    assert not window.valid.any()
    assert not window.values.any()
