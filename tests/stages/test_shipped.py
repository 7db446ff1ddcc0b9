from ppstream.config.load import read
from ppstream_stages.cartpole import layout, plant


def test_the_demo_configuration_says_what_the_robot_is() -> None:
    config = read("demo")
    for stream, ours in zip(config.streams, layout.STREAMS, strict=True):
        assert (stream.name, stream.dim) == (ours.name, len(ours.fields))
        assert stream.interpolation == ours.interpolation
        assert abs(stream.rate_hz * ours.period_ms / 1000 - 1) < 1e-9
    assert config.reference.name == layout.STREAMS[0].name
    assert (config.window.steps, config.window.dt_ms * 1e6) == (
        layout.WINDOW_STEPS,
        layout.WINDOW_DT_NS,
    )
    actions = config.actions
    assert (actions.names, actions.horizon) == ((layout.ACTION,), layout.HORIZON)
    assert (actions.dt_ms * 1e6, actions.lease_ms * 1e6) == (layout.ACTION_DT_NS, layout.LEASE_NS)
    assert (actions.low, actions.high) == ((-layout.FORCE_MAX_N,), (layout.FORCE_MAX_N,))
    assert config.demo is not None
    assert config.demo.robot == "ppstream_stages.cartpole.robot"


def test_a_chunk_lasts_its_lease_and_80_added_ms_leave_nothing_of_it() -> None:
    assert layout.HORIZON * layout.ACTION_DT_NS >= layout.LEASE_NS
    assert 80_000_000 + layout.ACTION_DT_NS < layout.LEASE_NS < 80_000_000 + 12_000_000


def test_the_body_file_has_the_plants_numbers() -> None:
    from ppstream_stages.cartpole.physics import CartPole

    model = CartPole(0).model
    assert model.body("cart").mass[0] == plant.CART_KG
    assert model.body("pole").mass[0] == plant.POLE_KG
    assert model.site("tip").pos[2] == plant.POLE_M
    assert model.body("pole").ipos[2] == plant.POLE_M / 2
    assert abs(model.body("pole").inertia[1] - plant.POLE_KG * plant.POLE_M**2 / 12) < 1e-9
    assert model.actuator("drive").ctrlrange.tolist() == [-layout.FORCE_MAX_N, layout.FORCE_MAX_N]


def test_the_benchmark_saturates_simulated_stages_that_are_worth_overlapping() -> None:
    config = read("bench")
    assert config.pipeline.pacing == "saturated"
    b_ms = config.policy.options["b_ms"]
    first_ms = config.simulate.a_ms + config.simulate.c_ms
    assert (first_ms + b_ms) / max(first_ms, b_ms) >= 1.2
    assert config.demo is None
    options = config.policy.options
    assert (options["horizon"], options["action_dim"]) == (
        config.actions.horizon,
        len(config.actions.names),
    )
