from pipeline_in_process import small_config

from ppstream.core.specs import TensorSpec
from ppstream.ingest.window import input_specs
from ppstream.policy.compatibility import policy_problems
from ppstream.policy.parts import PartSpecs

ACTIONS = TensorSpec("actions", (4, 2))
VALUES = TensorSpec("state.values", (8, 5))


def problems(inputs, outputs):
    config = small_config()
    return policy_problems(config, input_specs(config), [PartSpecs("policy", inputs, outputs)])


def test_a_policy_that_fits_has_no_problem():
    assert problems((VALUES,), (ACTIONS,)) == []


def test_every_way_in_which_a_policy_does_not_fit_is_named_at_once():
    found = problems(
        (TensorSpec("state.value", (8, 5)), TensorSpec("state.values", (8, 6))),
        (TensorSpec("actions", (4, 3)), TensorSpec("actions", (4, 3))),
    )
    text = "\n".join(found)
    assert "reads 'state.value', which no window has (did you mean state.values?)" in text
    assert "reads state.values [8, 6] float32, but streams and window make it" in text
    assert "names an output twice" in text
    assert "writes actions [4, 3] float32, but actions.horizon and actions.names want" in text


def test_bytes_that_could_not_be_told_from_unwritten_ones_are_refused():
    kinds = [TensorSpec(name, (6,), name) for name in ("bool", "int32", "float16")]
    assert problems((), (ACTIONS, *kinds, TensorSpec("mask", (4, 6), "uint8"))) == []
    for dtype in ("uint8", "int8", "float8_e4m3fn"):
        (text,) = problems((), (ACTIONS, TensorSpec("mask", (3, 3), dtype)))
        assert f"writes mask [3, 3] {dtype}, 9 bytes of a row" in text
    assert "pad it, or make it bool or int32" in text
