import msgspec
import numpy as np
import pytest
from robot_rig import make_config

from ppstream.config import load
from ppstream.config.schema import GatewayConfig
from ppstream.core.clock import NS_PER_S
from ppstream.core.errors import ConfigError
from ppstream.ingest.intake import NOTHING_READ, build_intake
from ppstream.ingest.sensor_health import SensorState

MS = 1_000_000


class Rig:
    """One robot of two streams (joints 100 Hz, imu 50 Hz), fed second by second."""

    def __init__(self, config=None, blind=NOTHING_READ):
        config = config or make_config()
        self.intake = build_intake(config, blind)
        self.row = self.intake.rows[0]
        self.row.open(7)
        self.changes, self.degraded = [], []
        self.unread_ns = 0
        tell = self.changes.append, self.degraded.append
        self.state = SensorState(config, self.intake, *tell, lambda: self.unread_ns)
        self.now_ns = NS_PER_S
        self.state.check(self.now_ns)

    def second(self, joints=100, imu=50, value=None, stamps=None):
        """Feed a second's worth of samples, then look."""
        for name, n, dtype in (("joints", joints, np.float32), ("imu", imu, np.float64)):
            ring = self.row.rings[name]
            for i in range(n):
                at_ns = self.now_ns + i * NS_PER_S // n
                stamp = at_ns if stamps is None else stamps
                values = np.full((1, ring.stream.dim), at_ns if value is None else value, dtype)
                ring.append(np.array([stamp], np.int64), values, at_ns)
        self.now_ns += NS_PER_S
        self.state.check(self.now_ns)

    def new_robot_without(self, stream):
        """Three seconds of a robot that never sends one of its streams."""
        self.row.close()
        self.row.open(8)
        for _ in range(3):
            self.second(**{stream: 0})

    def told(self):
        found = [(c.stream, c.condition) for c in self.changes]
        self.changes.clear()
        return found


@pytest.fixture
def rig():
    rig = Rig()
    rig.second()
    assert rig.told() == []
    assert rig.degraded == []
    return rig


def test_a_silent_stream_is_told_once_and_its_return_too(rig):
    rig.second(imu=0)
    rig.second(imu=0)
    rig.second(imu=0)
    assert rig.told()[-1] == ("imu", "silent")
    assert rig.degraded == [True]
    rig.second()
    assert rig.told() == [("imu", "ok")]
    assert rig.degraded == [True, False]


def test_a_stream_on_request_is_never_silent_or_slow():
    config = make_config()
    streams = tuple(
        msgspec.structs.replace(stream, max_request_hz=stream.rate_hz, rate_hz=None)
        for stream in config.streams
    )
    rig = Rig(msgspec.structs.replace(config, streams=streams))
    rig.second()
    rig.second(joints=3, imu=0)
    rig.second(joints=0, imu=0)
    assert rig.told() == []
    rig.second(value=np.nan)
    assert rig.told() == [("joints", "refused"), ("imu", "refused")]


def test_a_collapsed_rate_is_slow(rig):
    rig.second(joints=20)
    assert rig.told() == [("joints", "slow")]
    assert rig.degraded == [True]


@pytest.mark.parametrize(("joints", "told"), [(49, [("joints", "slow")]), (51, [])])
def test_less_than_half_of_the_nominal_rate_is_slow(rig, joints, told):
    rig.second(joints=joints)
    assert rig.told() == told


def test_slow_and_silent_say_what_was_measured_the_limit_and_what_helps(rig):
    rig.second(joints=20, imu=0)
    asks = "; a robot that asks (RobotClient.ask) wants max_request_hz in place of rate_hz"
    assert {change.stream: change.why for change in rig.changes} == {
        "joints": "20.0 samples/s; limit 50, half its rate_hz; see what slows it down, or set "
        f"rate_hz to what it sends{asks}",
        "imu": f"no sample for 1.02 s; limit 1.00 s; see that it is pushed{asks}",
    }


def test_no_robot_is_blamed_for_a_second_in_which_rank_0_read_nothing(rig):
    rig.unread_ns = NS_PER_S // 2
    rig.second(joints=20, imu=0)
    asks = "rank 0 read nothing for 0.50 s, the robot may be well; see what held it up; one rank "
    asks += "whose policy holds Python's interpreter (its GIL) wants --nproc 2"
    assert {change.stream: change.why for change in rig.changes} == {
        "joints": f"20.0 samples/s; limit 50, half its rate_hz; {asks}",
        "imu": f"no sample for 1.02 s; limit 1.00 s; {asks}",
    }
    rig.changes.clear()
    ring = rig.row.reference
    stamps = np.arange(rig.now_ns - 5 * NS_PER_S, rig.now_ns - 4 * NS_PER_S, 10 * MS)
    rig.second(joints=0)
    ring.clear("new_episode")
    ring.append(stamps, np.zeros((len(stamps), 3), np.float32), rig.now_ns)
    rig.state.check(rig.now_ns + NS_PER_S)
    assert f"100% of samples stale; {asks}" in [change.why for change in rig.changes]


def test_behind_a_gateway_a_slow_or_silent_stream_is_one_on_request():
    rig = Rig(msgspec.structs.replace(make_config(), gateway=(GatewayConfig("openpi", {}),)))
    rig.second()
    rig.second(joints=20, imu=0)
    helps = "; a gateway's clients send on request: set max_request_hz in place of rate_hz; of an"
    assert len(rig.changes) == 2
    assert all(helps in change.why for change in rig.changes)


def test_a_stream_of_which_nothing_came_yet_is_not_told_to_lower_its_rate(rig):
    rig.new_robot_without("imu")
    whys = [change.why for change in rig.changes if change.stream == "imu"]
    assert whys
    assert all("see that it is pushed" in why for why in whys)


def test_a_stream_too_fast_for_its_ring_is_told_while_a_window_lacks_its_begin():
    config = make_config()
    window = msgspec.structs.replace(config.window, steps=11, dt_ms=200.0)
    rig = Rig(msgspec.structs.replace(config, window=window))
    kept = rig.intake.banks["joints"].capacity
    for _ in range(3):
        rig.second()
    assert rig.told() == []
    rate = kept  # a second's worth, and a window has two
    for _ in range(3):
        rig.second(joints=rate)
    (change,) = rig.changes
    assert (change.stream, change.condition) == ("joints", "fast")
    assert change.why == (
        f"{rate}.0 samples/s, rate_hz is 100: the {kept} kept reach back 1.00 s, a window 2.00 s; "
        "set rate_hz to what it sends"
    )
    assert rig.degraded == [True]
    for _ in range(4):
        rig.second()
    assert rig.degraded == [True, False]


def test_a_fast_stream_of_which_windows_are_whole_is_no_trouble(rig):
    for _ in range(3):
        rig.second(joints=1000)
    assert rig.told() == []


def test_a_slow_stream_is_well_once_it_is_clearly_faster(rig):
    for joints, told in ((49, "slow"), (55, None), (59, None), (61, "ok")):
        rig.second(joints=joints)
        assert rig.told() == ([("joints", told)] if told else [])


def test_a_stream_that_is_slow_now_and_then_is_told_seldom(rig):
    for number in range(60):
        rig.second(joints=100 if number % 2 else 20)
    assert rig.told() == [("joints", "slow"), ("joints", "ok"), ("joints", "slow")]
    for _ in range(12):
        rig.second()
    assert rig.told() == [("joints", "ok")]
    rig.second(joints=20)
    rig.second()
    assert rig.told() == [("joints", "slow"), ("joints", "ok")]  # it was well for long


def test_a_robot_that_takes_over_a_row_is_not_judged_by_the_second_of_its_predecessor(rig):
    rig.row.close()
    rig.row.open(8)
    rig.second(joints=20)  # it came late in that second
    assert rig.told() == []
    rig.second(joints=20)
    assert rig.told() == [("joints", "slow")]


def test_samples_that_are_refused_are_told(rig):
    rig.second(value=np.nan)
    assert rig.told() == [("joints", "refused"), ("imu", "refused")]


def refusals(offsets_s):
    """Why streams are refused of a robot whose streams are stamped so far ahead of its clock."""
    config = make_config()
    joints = config.streams[0]
    streams = [msgspec.structs.replace(joints, name=name, reference=False) for name in offsets_s]
    config = msgspec.structs.replace(config, streams=tuple(streams))
    rig = Rig(config)
    for i in range(100):
        at_ns = rig.now_ns + i * NS_PER_S // 100
        for name, offset_s in offsets_s.items():
            stamps = np.array([at_ns + round(offset_s * NS_PER_S)])
            rig.row.rings[name].append(stamps, np.full((1, joints.dim), i, np.float32), at_ns)
    rig.now_ns += NS_PER_S
    rig.state.check(rig.now_ns)
    assert {change.condition for change in rig.changes} <= {"refused"}
    return {change.stream: change.why for change in rig.changes}


ALONE = "; force is alone against joints, front, left; stamp all streams by one clock"


def test_a_stream_behind_all_others_is_named_as_theirs_are_refused():
    found = refusals({"force": -5, "joints": 0, "front": 0, "left": 0})
    why = f"100% of samples future, 5.00 s ahead of force; limit 1.00 s{ALONE}"
    assert found == dict.fromkeys(["joints", "front", "left"], why)


def test_a_stream_ahead_of_all_others_is_named_as_theirs_are_refused():
    found = refusals({"force": 5, "joints": 0, "front": 0, "left": 0})
    why = f"100% of samples stale, 5.00 s behind force; limit 0.43 s{ALONE}, and send samples at"
    assert set(found) == {"joints", "front", "left"}
    assert all(text.startswith(why) for text in found.values()), found


def test_a_stream_that_is_refused_beside_many_is_alone():
    found = refusals({"joints": 0, "force": 5, "front": 0, "left": 0.1})
    assert found == {"force": f"100% of samples future, 4.90 s ahead of left; limit 1.00 s{ALONE}"}


@pytest.mark.parametrize("others", [{}, {"left": 0, "front": -5}])
def test_of_clocks_with_as_many_streams_none_is_alone(others):
    offsets = {"force": -5, "joints": 0, **others}
    found = refusals(offsets)
    stamps = ", ".join(f"{name} {offset_s:+.2f} s" for name, offset_s in offsets.items())
    assert found["joints"] == (
        "100% of samples future, 5.00 s ahead of force; limit 1.00 s; whose stamps are off is not "
        f"known (from rank 0's clock: {stamps}); stamp all streams by one clock"
    )


def test_samples_out_of_order_are_told_with_how_late_they_are(rig):
    for i in range(100):
        at_ns = rig.now_ns + i * NS_PER_S // 100
        stamp_ns = at_ns - 200 * MS * (i % 5 > 0)
        values = np.full((1, 3), i, np.float32)
        rig.row.rings["joints"].append(np.array([stamp_ns]), values, at_ns)
    rig.second(joints=0)
    (change,) = [change for change in rig.changes if change.stream == "joints"]
    assert change.why == (
        "80% of samples late, 0.20 s behind the newest; stamp and send a stream's samples in the "
        "order of their time"
    )


def test_samples_that_are_no_numbers_are_told_as_such(rig):
    rig.second(value=np.nan)
    why = "100% of samples non_finite; send values that float32 can hold"
    assert {change.why for change in rig.changes} == {why}
    rig.second()
    assert {change.why for change in rig.changes if change.condition == "ok"} == {""}


def test_values_that_never_change_are_told_and_do_not_degrade(rig):
    rig.second(value=0.25)
    why = " samples with the same values; if the robot moves, see the sensor"
    assert all(change.why.endswith(why) for change in rig.changes)
    assert rig.told() == [("joints", "unchanged"), ("imu", "unchanged")]
    assert rig.degraded == []
    rig.second()
    assert rig.told() == [("joints", "ok"), ("imu", "ok")]


def test_a_robot_that_leaves_takes_its_conditions_along(rig):
    rig.second(joints=0, imu=0)
    rig.second(joints=0, imu=0)
    assert rig.degraded == [True]
    rig.row.close()
    rig.second(joints=0, imu=0)
    assert rig.degraded == [True, False]
    assert rig.state.conditions == {}


@pytest.mark.parametrize("behind", [0, 1, 9])
def test_a_new_episode_at_the_end_of_a_second_tells_nothing(rig, behind):
    for i in range(101):
        at_ns = rig.now_ns + i * NS_PER_S // 101
        if i == 101 - behind:
            rig.row.new_episode()
        for ring in rig.row.rings.values():
            value = at_ns if i < 101 - behind else 0.5
            values = np.full((1, ring.stream.dim), value, ring.stream.dtype)
            ring.append(np.array([at_ns]), values, at_ns)
    if not behind:
        rig.row.new_episode()
    rig.now_ns += NS_PER_S
    rig.state.check(rig.now_ns)
    assert rig.told() == []
    assert rig.degraded == []


def test_a_stream_that_ends_with_its_episode_is_silent_once_its_age_is_over():
    config = make_config()
    streams = tuple(
        msgspec.structs.replace(stream, max_age_ms=3000.0, rate_hz=5.0) for stream in config.streams
    )
    rig = Rig(msgspec.structs.replace(config, streams=streams))  # too seldom to be slow
    rig.second(joints=5, imu=5)
    rig.row.new_episode()
    rig.second(joints=0, imu=5)
    rig.second(joints=0, imu=5)
    assert rig.told() == []
    rig.second(joints=0, imu=5)
    rig.second(joints=0, imu=5)
    assert rig.told() == [("joints", "silent")]


def test_a_stream_that_never_came_is_silent(rig):
    rig.new_robot_without("joints")
    assert rig.told()[-1] == ("joints", "silent")


def on_request():
    config = make_config()
    joints, imu = config.streams
    imu = msgspec.structs.replace(imu, rate_hz=None, max_request_hz=50.0)
    return msgspec.structs.replace(config, streams=(joints, imu))


@pytest.mark.parametrize(
    ("blind", "is_needed"), [({}, False), ({"state": True}, True), ({"state": False}, True)]
)
def test_a_row_lacks_a_stream_that_the_policy_reads_without_looking_at_its_validity(
    blind, is_needed
):
    rig = Rig(on_request(), blind)
    rig.second(imu=0)
    assert rig.row.present == (not is_needed)
    assert rig.told() == ([("imu", "silent")] if is_needed else [])
    rig.second()
    assert rig.row.present
    assert rig.told() == ([("imu", "ok")] if is_needed else [])
    rig.second(joints=15, imu=0)  # 0.93 s on: a maximum age of 0.2 s is over
    assert rig.row.present == (not is_needed)


def test_what_can_only_leave_robots_without_actions_is_refused_at_once():
    config = load.read("two_cameras", ["streams.wrist.max_age_ms=30"])
    gateway = msgspec.convert({"wire": "openpi", "map": map_of(config)}, GatewayConfig)
    config = msgspec.structs.replace(config, gateway=(gateway,))
    build_intake(config, {"top": True, "proprio": True})
    with pytest.raises(ConfigError) as refused:
        build_intake(config, {"wrist": False})
    optional, seldom = refused.value.problems
    assert optional.startswith("gateway[0].map.wrist.optional: got true, want false: the policy")
    assert "max_age_ms: got 30 for 'wrist', want at least the 33.3333 ms" in seldom
    for slower in ("streams.joints.rate_hz=30", "streams.joints.rate_hz=5"):
        config = load.read("two_cameras", ["streams.wrist.max_age_ms=30", slower])
        build_intake(config, {"wrist": False})  # a frame may come with each sample


def scheduled(config):
    shape = msgspec.structs.replace(config.pipeline, windows="scheduled")
    return msgspec.structs.replace(config, pipeline=shape)


def test_a_stream_is_young_enough_wherever_windows_may_end():
    """At requests of a robot, or each ``dt_ms`` of a schedule, however seldom the reference."""
    slow = ["streams.wrist.rate_hz=4", "streams.wrist.max_gap_ms=250"]
    asked = ["streams.joints.rate_hz=none", "streams.joints.max_request_hz=30"]
    seldom = ["streams.joints.rate_hz=4", "streams.joints.max_gap_ms=250"]
    for config in (
        load.read("two_cameras", [*slow, *asked]),
        scheduled(load.read("two_cameras", [*slow, *seldom])),
    ):
        with pytest.raises(ConfigError, match="got 200 for 'wrist', want at least the 250 ms"):
            build_intake(config, {"wrist": True})
    build_intake(load.read("two_cameras", [*slow, *seldom]), {"wrist": True})


def test_the_reference_stream_is_needed_where_a_schedule_ends_windows():
    rig = Rig(scheduled(make_config()), {"state": True})
    rig.second()
    joints, imu = rig.row.rings["joints"], rig.row.rings["imu"]
    last_ns, imu_ns = joints.newest_ns, joints.newest_ns + 50 * MS
    imu.append(np.array([imu_ns]), np.zeros((1, imu.stream.dim)), imu_ns)
    assert rig.row.present_at(last_ns + 200 * MS)
    assert not rig.row.present_at(last_ns + 201 * MS)  # joints are too old


def map_of(config):
    keys = {stream.name: stream.name for stream in config.streams}
    return keys | {"wrist": {"key": "wrist", "optional": True}}


def test_a_camera_is_needed_like_any_other_stream_and_the_reference_never():
    config = load.read("two_cameras")
    names = {name: build_intake(config, {name: True}).rows[0] for name in ("top", "wrist")}
    for name, row in names.items():
        row.open(1)
        ring = row.rings[config.reference.name]
        ring.append(np.array([1]), np.zeros((1, ring.stream.dim), np.float32), 1)
        assert not row.present
        assert [one.name for one in config.streams if row.lacks(one.name)] == [name]


ASKED = ["streams.top.max_request_hz=30", "streams.top.rate_hz=none"]


@pytest.mark.parametrize(
    ("is_whole", "rate", "frames"),
    [(True, [], 2), (False, [], 1), (True, ASKED, 1)],  # who asks sends the next with the answer
)
def test_a_camera_that_ends_windows_has_all_its_frames_first(is_whole, rate, frames):
    more = ["streams.joints.reference=false", "streams.top.reference=true", *rate]
    config = load.read("two_cameras", [*more, "streams.top.image.frames=2"])
    (row,) = build_intake(config, {"top": is_whole}).rows
    row.open(1)
    ring = row.rings["top"]
    for number in (1, 2):
        assert row.present == (number > frames)
        ring.append(np.array([number]), np.zeros((1, ring.stream.dim), np.uint8), number)
    assert row.present
