import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from ppstream.core.errors import ConfigError
from ppstream_stages.simulated import build

CPU = torch.device("cpu")
SHAPE = {"horizon": 4, "action_dim": 2}


def run_ms(
    options: dict[str, object], calls: int, clock_ns: Callable[[], int] = time.monotonic_ns
) -> list[float]:
    policy = build({**SHAPE, **options}, CPU)
    out = {spec.name: torch.ones(1, *spec.shape) for spec in policy.outputs}
    durations = []
    for _ in range(calls):
        began = clock_ns()
        policy({}, out)
        durations.append((clock_ns() - began) / 1e6)
    return durations


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_a_call_takes_at_least_its_duration(kind: str) -> None:
    durations = sorted(run_ms({"b_ms": 3.0, "kind": kind}, 15))
    assert 3.0 <= durations[0] < 6.0  # others who use the machine stretch the rest


def test_durations_of_every_law_are_about_as_long_as_asked() -> None:
    # Half the asked time or double it would be far outside; the mean is tested where it is drawn.
    # Others who use the machine stretch a spin, and give it less of a processor.
    for law in ("uniform", "tail"):
        options: dict[str, object] = {"b_ms": 1.0, "kind": "spin", "law": law}
        assert median(run_ms(options, 150)) > 0.8, law
        assert median(run_ms(options, 150, time.thread_time_ns)) < 1.8, law


def test_actions_are_zero_and_the_payload_has_the_asked_size() -> None:
    policy = build({**SHAPE, "b_ms": 0, "payload": 1000, "weights": None}, CPU)
    actions, payload = policy.outputs
    assert (actions.shape, payload.shape, payload.dtype) == ((4, 2), (1000,), "uint8")
    out = {"actions": torch.ones(1, 4, 2), "payload": torch.ones(1, 1000, dtype=torch.uint8)}
    policy({}, out)
    assert not any(tensor.any() for tensor in out.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "gpu"}, "kind"),
        ({"law": "normal"}, "law"),
        ({"b_ms": -1}, "b_ms"),
        ({"speed": 2}, "speed"),
        ({"weights": "w.safetensors"}, "weights"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.options.*{text}"):
        build({**SHAPE, "b_ms": 1, **options}, CPU)
