"""The golden table: a run's log in, its report's JSON out.

A case is a run of the recurrence with a fault bent in, the verdict with all its reasons, every
audit that fails (and its note), and further places of the JSON; ``judging.check`` compares them.
"""

from __future__ import annotations

import pytest
from faulty_runs import (
    ONE_CREDIT,
    SLOW_INPUT,
    SPLIT,
    a_before_credit,
    alone,
    b_alone_behind,
    busy,
    chunks,
    cpu,
    cut,
    disk_full_for_a_time,
    dropped,
    event,
    first_alone,
    full_disk,
    idle,
    killed_in_service,
    leased,
    links_in_b,
    locked,
    machine,
    nobodys_fault,
    on_another_clock,
    received_late,
    robot,
    said,
    served,
    sessions,
    slow_service,
    swapped,
    taken_out,
    twice,
    unbalanced,
    unnamed,
    unserved,
    unset,
    unsettled,
    wait_in_b,
    warming,
)
from golden_runs import jittered, ms, period_17, stages
from golden_runs import simulate as run
from judging import Case, check

from ppstream.analysis.period_model import PipelineForm

PREBUILT = PipelineForm("split", credit="after_window", d_in=1)
IN_TURN = PipelineForm("serial", "decode_first")
SLOW_C = stages(c=20)
ONE_IN_80_SLOW = [*[stages()] * 79, stages(b=120)] * 5
FEW_SLOW = [*[stages()] * 200, stages(b=40), *[stages()] * 200]
EVERY_OTHER_SLOW = [stages(4, 80, 5), stages(4, 20, 5)] * 200
JUST_IN_TIME = PipelineForm(d_in=1)
RELEASE = {"profile": "release"}
HERE = "topology.ranks.0.boot_id", "here"
DEVICE = "topology.ranks.0.stamp_source", "device"
BUDGETS = RELEASE | {"period_budget_ns": ms(9), "latency_budget_ns": ms(19)}
FAIL, PASS, UNKNOWN = "FAIL", "PASS", "INCONCLUSIVE"
STAMPS = ("tRx", "tA0", "tA1", "tSend", "tRecv", "tDecode", "tEmit")
CAMERA = {"received": 100, "used": 70, "dropped": {"late": 9, "gap": 0}, "in_flight": 20}
JOINT = {"received": 10, "used": 10, "dropped": {}, "in_flight": 0}
LATE = {"drops.samples": {"late": 9}, "drops.imbalance": {"camera": 1}, "says": "camera +1"}
RELEASED = {"with": RELEASE, "primary.S": 1, "compat.gate": True, "class": "stage1-limited"}

# fmt: off
TABLE: dict[str, Case] = {
    # ---- where the published score lies ----------------------------------------------------------
    "healthy, serial": (run, "PASS", RELEASED),
    "healthy, split": (lambda: run(form=SPLIT), "PASS", RELEASED),
    "healthy, prebuilt": (lambda: run(form=PipelineForm("serial", credit="after_window")), "PASS",
        RELEASED),
    "healthy, split and prebuilt": (lambda: run(form=PipelineForm("split", credit="after_window")),
        "PASS", RELEASED),
    "A, B and C in turn": (lambda: run(form=IN_TURN), "FAIL LOW_OVERLAP", {"primary.P_ms": 20,
        "compat.overlap_score": 0, "primary.S_all": 0, "class": "serialized",
        "says": ["the stages run in turn", "decoded",
            "one rank would take 19.0 ms for A, B and C in turn",
            'serve anyway with bringup.accept = ["LOW_OVERLAP"]']}),
    "in turn, tB0 before the receive": (lambda: wait_in_b(run(form=IN_TURN)),
        "INCONCLUSIVE BAD_INSTRUMENT NOT_AUDITED CONTENDED | residence; outstanding",
        {"compat.overlap_score": 1, "audits.outstanding.value": 0.45}),
    "input every 40 ms": (lambda: run(SLOW_INPUT), "INCONCLUSIVE INPUT_LIMITED LOW_OVERLAP",
        {"primary.P_ms": 40, "compat.overlap_score": 0.8, "class": "input-limited",
        "critical_path.A.sensor": 1,
        "says": ["78% of the time", "the published score 0.80 would have passed"]}),
    "A just in time, one credit": (lambda: run(form=JUST_IN_TIME), "PASS",
        {"primary.P_ms": 15, "compat.overlap_score": 0.8, "primary.S": 0.444,
        "class": "window-limited", "model.W_star": 2, "critical_path.C.A on the same thread": 1,
        "says": ["raise D_in from 1 to 2", "33% less period", "actions 4.00 ms younger"]}),
    "just in time, released": (lambda: run(form=JUST_IN_TIME), "FAIL LOW_EFFICIENCY",
        {"with": RELEASE}),
    "decode-bound, D 2": (lambda: run(SLOW_C, SPLIT, n=450), "PASS", {"primary.P_ms": 20,
        "compat.overlap_score": 5.35, "primary.S": 1, "primary.E": 1, "latency_ms.p50": 99.5,
        "class": "stage0-limited", "critical_path.A.credit": 1, "critical_path.B.envelope": 1,
        "critical_path.C.previous C": 1, "says": ["rank 0 sets", "C is busy 100% of it"]}),
    "decode-bound, D 4": (lambda: run(SLOW_C, PipelineForm("split", d_in=4, d_out=4), n=450),
        "PASS", {"compat.overlap_score": 9.35, "primary.S": 1, "latency_ms.p50": 179.5}),
    "decode-bound, tRecv at decode": (
        lambda: run(SLOW_C, SPLIT).put(tRecv=lambda line: line["tDecode"]),
        "INCONCLUSIVE BAD_INSTRUMENT | little; credit", {"compat.overlap_score": 1.4,
        "primary.S": 1}),
    "A and C of 50 µs": (lambda: run(stages(a=0.05, c=0.05), SPLIT), "INCONCLUSIVE NOTHING_TO_HIDE",
        {"primary.P_ms": 10, "compat.overlap_score": 1, "primary.G_star": 1.01,
        "says": ["1.01x (needs 1.10x)"]}),
    "A and C of 20 µs": (lambda: run(stages(a=0.02, c=0.02), SPLIT), "INCONCLUSIVE NOTHING_TO_HIDE",
        {"compat.overlap_score": None, "compat.gate": False}),
    "tB1 when Python returns": (
        lambda: run(form=SPLIT).put(eB_ns=lambda line: line["B_ns"], B_ns=ms(0.2)).lose(rank=1),
        "INCONCLUSIVE BAD_INSTRUMENT NOT_AUDITED | conservation; bounds(eB_ns over B_ns)",
        {"compat.overlap_score": 0}),
    "period 17 of 10 and 10": (period_17, "PASS", {"primary.P_ms": 17, "compat.overlap_score": 0.3,
        "compat.gate": False, "says": ["the published gate would have refused",
            "17.0 ms lies nearer the sum of both stages"]}),
    "period 17, released": (period_17, "FAIL LOW_EFFICIENCY", {"with": RELEASE,
        "primary.E": 0.588}),
    "tA0 before the credit wait": (a_before_credit,
        "INCONCLUSIVE BAD_INSTRUMENT CONTENDED | credit", {"primary.P_ms": 15,
        "compat.overlap_score": 1.5, "primary.S": 1}),
    "action picked up 3 ms later": (lambda: run().put(tPick=lambda line: line["tEmit"] + ms(3)),
        "PASS", {"latency_ms.p50": 23, "pick_up_ms.p50": 3, "pick_up_ms.max": 3, "primary.S": 1}),
    # ---- which reason decides --------------------------------------------------------------------
    "safety first": (lambda: run(SLOW_INPUT, n=60).put(at=slice(30, 31), outstanding_max=3),
        "FAIL QUEUE_BOUND TOO_FEW INPUT_LIMITED LOW_OVERLAP"),
    "99 periods": (lambda: run(n=110), "INCONCLUSIVE TOO_FEW",
        {"says": "99 envelopes after warm-up, 100 needed; raise bringup.envelopes"}),
    "99 periods in service": (lambda: run(n=110, phase="ready"), "INCONCLUSIVE TOO_FEW",
        {"says": "99 envelopes after warm-up, 100 needed; let it run longer"}),
    "one period": (lambda: run(n=12), "INCONCLUSIVE NOT_AUDITED TOO_FEW",
        {"says": "1 envelope after warm-up, 100 needed; raise bringup.envelopes"}),
    "100 periods": (lambda: run(n=111), "PASS", {"n": 100}),
    "consumer blocks": (lambda: run(form=SPLIT, emit_block_ms=8), "INCONCLUSIVE OUTPUT_LIMITED",
        {"class": "output-limited"}),
    "profiled": (lambda: run(mode="attribution"), "INCONCLUSIVE PERTURBED TOO_FEW"),
    "fault inside": (lambda: run().tell(event("fault", t=2_500_000_000)), "INCONCLUSIVE PERTURBED"),
    "fault before": (lambda: run().tell(event("fault")), "PASS"),
    "warm-up drifts": (warming, "PASS", {"warmup_skipped": 40}),
    "never settles": (unsettled, "INCONCLUSIVE NOT_WARM NOTHING_TO_HIDE"),
    "recompiles at 25": (lambda: run().put(1, slice(25, 26), recompiles=1), "PASS",
        {"warmup_skipped": 26}),
    "one rank": (lambda: run(form=IN_TURN).set("topology.world_size", 1), "INCONCLUSIVE INLINE",
        {"primary.S": None, "compat": None}),
    "no durations of B": (lambda: run().put(B_ns=None).lose(rank=1),
        "INCONCLUSIVE MISSING_LOGS BAD_INSTRUMENT | conservation", {"primary": None,
        "latency_ms.p50": 20}),
    "rank 0 without B's times": (
        lambda: run().put(B_ns=None, residence_ns=None, wait_input_ns=None), "PASS",
        {"primary.S": 1}),
    "no file of rank 1": (lambda: run().lose(rank=1), "INCONCLUSIVE NOT_AUDITED",
        {"audits.conservation.ok": True, "says": "stamps: the policy rank's lines are missing"}),
    "rank 1 of another host": (
        lambda: run().set(*HERE).set("policy_rank.boot_id", "there").lose(rank=1), "PASS",
        {"says": "on another host"}),
    "rank 1 of this host": (
        lambda: run().set(*HERE).set("policy_rank.boot_id", "here").lose(rank=1),
        "INCONCLUSIVE NOT_AUDITED"),
    "no waits": (
        lambda: run().lose("w_input_ns", "w_result_ns", "w_emit_ns", "w_credit_ns", "w_slot_ns"),
        "INCONCLUSIVE MISSING_LOGS", {"audits.conservation.ok": None}),
    "no wait of one thread": (lambda: run(form=SPLIT).lose("w_result_ns", "w_emit_ns"),
        "INCONCLUSIVE MISSING_LOGS", {"audits.conservation.ok": None,
        "audits.conservation.missing": ["w_result_ns"]}),
    "one line lost": (lambda: run().lose(at=slice(150, 151)), "PASS", {"primary.P_ms": 10,
        "n": 313}),
    "one dropped": (lambda: run().put(at=slice(100, 101), drop="stale"), "PASS",
        {"n": 318, "drops.envelopes": {"stale": 1}}),
    "every tenth dropped": (lambda: run().put(at=slice(0, None, 10), drop="stale"), "PASS",
        {"primary.bubble.mesh": 0}),
    "epoch cut, seq restarts": (lambda: cut(0), "PASS", {"warmup_skipped": 14, "primary.P_ms": 10}),
    "epoch cut, seq runs on": (lambda: cut(200), "PASS", {"warmup_skipped": 14,
        "primary.P_ms": 10}),
    "idle robot": (lambda: idle("w_input_ns"), "PASS", {"primary.P_ms": 10}),
    "stall of 500 ms": (lambda: idle("w_credit_ns", "w_result_ns"), "PASS",
        {"primary.P_ms": 11.57}),
    "goes on": (lambda: run(n=400).lose(at=slice(300, None)).lose(rank=1, at=slice(297, None)),
        "PASS"),
    "released over its budgets": (run, "FAIL PERIOD_BUDGET LATENCY_BUDGET", {"with": BUDGETS}),
    "asks for more overlap": (lambda: run(form=JUST_IN_TIME).set("config.bringup.overlap_min", 0.6),
        "FAIL LOW_OVERLAP"),
    "asks for less overlap": (lambda: run().set("config.bringup.overlap_min", 0.05), "PASS",
        {"limits": {"overlap_min": 0.05, "accept": []}, "says": "overlap_min is 0.05"}),
    "accepts low overlap": (lambda: run(form=IN_TURN)
            .set("config.bringup", {"overlap_min": 0.2, "accept": ["LOW_OVERLAP", "X"]}),
        "FAIL LOW_OVERLAP", {"accepted": ["LOW_OVERLAP"], "says": "SERVING"}),
    "A and C on one device": (lambda: run(stages(a=6, b=10, c=6), SPLIT).set(*DEVICE),
        "PASS", {"primary.bubble.gpu0": 0.396}),
    # ---- drops -----------------------------------------------------------------------------------
    "expired": (lambda: (dropped(run(stages(b=66)), 100, "expired").set("standalone.B_ns", ms(14))
            .put(window_end_ns=ms(1), expires_ns=ms(91))
            .set("config.actions", {"lease_ms": 90.0})
            .tell(machine(2, load_1min=8.6, steal_share=0.1))), "INCONCLUSIVE EXPIRED",
        {"says": ["EXPIRED: 326 of 330 were older than the lease of 90.0 ms when they were ready "
                  "(B took 66.0 ms, 14.0 alone); actions are 1",
                  "robots need 198 ms, and actions.lease_ms is 90; free the machine, or set",
                  "load 8.6 on 2 usable CPUs, 10% stolen"]}),
    "expired between two samples": (lambda: dropped(run(), 100, "expired")
            .set("config.actions", {"lease_ms": 90.0})
            .set("config.streams", [{"name": "joints", "rate_hz": 2.0}])
            .set("config.service", {"recording": "arm.mcap"}), "INCONCLUSIVE EXPIRED",
        {"says": "; bring-up repeats a window until the next sample of its sensors comes; actions "
                 "are 20.0 ms old when they are made (p95), and the next ones come with the next "
                 "sample, 500 ms later: robots need 520 ms, and actions.lease_ms is 90; free the "
                 "machine, or set actions.lease_ms to 572"}),
    "other drops": (lambda: dropped(run(), 100, "policy_error", "non_finite", "policy_error"),
        "INCONCLUSIVE DROPPED",
        {"says": "DROPPED: 326 of 330 envelopes were dropped: 217 policy_error, 109 non_finite"}),
    "more than half dropped": (lambda: run(n=400).put(at=slice(210), drop="expired"),
        "INCONCLUSIVE EXPIRED"),
    "less than half dropped": (lambda: run(n=400).put(at=slice(30, 210), drop="expired"), "PASS"),
    "dropped by nobody's fault": (nobodys_fault, "FAIL CONTENDED"),
    # ---- what a lease must cover -----------------------------------------------------------------
    "a lease below age and period": (lambda: run().set("config.actions", {"lease_ms": 28.0}),
        "FAIL SHORT_LEASE",
        {"says": "SHORT_LEASE: robots would hold 20.0% of the time, behind 318 of 318 chunks "
            "(limit 5% of each): actions are 20.0 ms old when they are made (p95), and the next "
            "ones come 10.0 ms later (p50): robots need 30.0 ms, and actions.lease_ms is 28; "
            "set actions.lease_ms to 33, a tenth to spare; robots that ask for each chunk "
            "(RobotClient.ask) need no more than its age: give what they send max_request_hz in "
            "place of rate_hz", "lease": {"age_ms": 20, "gap_ms": 10, "lease_ms": 28, "need_ms": 30,
            "longest_ms": 30, "holds": 318, "chunks": 318, "held": 0.2}}),
    "a lease of age and period": (lambda: run().set("config.actions", {"lease_ms": 30.0}), "PASS"),
    "a shallower queue for a short lease": (lambda: run(stages(6, 50, 8))
            .set("config.actions", {"lease_ms": 110.0}), "FAIL SHORT_LEASE",
        {"says": "set actions.lease_ms to 165, a tenth to spare, or pipeline.d_in to 1 and "
            "actions.lease_ms to 141, a tenth to spare, for actions 29.0 ms younger and 12% fewer "
            "of them"}),
    "a shallower queue that suffices": (lambda: run(stages(6, 50, 8))
            .set("config.actions", {"lease_ms": 130.0}), "FAIL SHORT_LEASE",
        {"says": "set actions.lease_ms to 165, a tenth to spare, or pipeline.d_in to 1, for a"}),
    "the shallower queue": (lambda: run(stages(6, 50, 8), PipelineForm(d_in=1))
            .set("config.actions", {"lease_ms": 130.0}), "PASS"),
    "chunks that come behind their last step": (lambda: run()
            .set("config.actions", {"lease_ms": 300.0, "dt_ms": 3.0, "horizon": 5}),
        "FAIL SHORT_LEASE",
        {"says": "SHORT_LEASE: robots would hold for want of a step that is still due in 318 of "
            "318 chunks (limit 5%): actions are 20.0 ms old when they are made (p95), and the next "
            "ones come 10.0 ms later (p50): robots need 30.0 ms, and actions.lease_ms is 300, and "
            "all steps of a chunk are past 18.0 ms behind its window (actions.horizon 5, dt_ms 3); "
            "set actions.horizon to 7, steps that the policy must give, a tenth to spare; robots "
            "that ask"}),
    "chunks that come before their last step": (lambda: run()
            .set("config.actions", {"lease_ms": 300.0, "dt_ms": 3.0, "horizon": 7}), "PASS"),
    "chunks that come late, of a short lease": (lambda: run()
            .set("config.actions", {"lease_ms": 28.0, "dt_ms": 3.0, "horizon": 5}),
        "FAIL SHORT_LEASE",
        {"says": "behind 318 of 318 chunks (limit 5% of each), and for want of a step that is "
            "still due in 318 of 318 chunks: actions are 20.0 ms old when they are made (p95), and "
            "the next ones come 10.0 ms later (p50): robots need 30.0 ms, and actions.lease_ms is "
            "28, and all steps of a chunk are past 18.0 ms behind its window (actions.horizon 5, "
            "dt_ms 3); set actions.lease_ms to 33, actions.horizon to 7, steps that the policy"}),
    "chunks that robots ask for, behind their last step": (lambda: run()
            .set("config.actions", {"lease_ms": 300.0, "dt_ms": 3.0, "horizon": 5})
            .set("config.streams", [{"name": "joints", "max_request_hz": 5.0}]), "PASS"),
    "chunks past their lease and their last step": (lambda: dropped(run(stages(b=66)), 100,
            "expired").put(window_end_ns=ms(1), expires_ns=ms(91))
            .set("config.actions", {"lease_ms": 90.0, "dt_ms": 20.0, "horizon": 4}),
        "INCONCLUSIVE EXPIRED",
        {"says": "; free the machine, or set actions.lease_ms to 218, actions.horizon to 7, steps "
            "that the policy must give, a tenth to spare"}),
    "a shallower queue, any overlap accepted": (lambda: run(stages(0.1, 50, 0.1))
            .set("config.bringup", {"accept": ["NOTHING_TO_HIDE", "LOW_OVERLAP", "CONTENDED"]})
            .set("config.actions", {"lease_ms": 110.0, "dt_ms": 20.0, "horizon": 4}),
        "INCONCLUSIVE NOTHING_TO_HIDE SHORT_LEASE",
        {"says": "set actions.lease_ms to 165, a tenth to spare, or pipeline.d_in to 1, for "
            "actions 48.7 ms younger and 2% fewer of them"}),
    "an age limit below age and period": (lambda: run()
            .set("config.actions", {"lease_ms": 90.0, "max_age_ms": 28.0}), "FAIL SHORT_LEASE",
        {"says": "actions.max_age_ms is 28; set actions.max_age_ms to 33"}),
    "a short lease, accepted overlap": (lambda: run(form=IN_TURN)
            .set("config.actions", {"lease_ms": 28.0})
            .set("config.bringup", {"accept": ["LOW_OVERLAP"]}), "FAIL SHORT_LEASE LOW_OVERLAP",
        {"accepted": []}),
    "a short lease, nothing to hide": (lambda: run(stages(a=0.05, c=0.05), SPLIT)
            .set("config.actions", {"lease_ms": 28.0})
            .set("config.bringup", {"accept": ["NOTHING_TO_HIDE"]}),
        "INCONCLUSIVE NOTHING_TO_HIDE SHORT_LEASE", {"accepted": []}),
    "a short lease of robots that ask": (lambda: run().set("config.actions", {"lease_ms": 28.0})
            .set("config.streams", [{"name": "joints", "max_request_hz": 5.0}]), "PASS",
        {"says": "whether the lease suffices was not judged, since the reference stream comes on "
            "request (max_request_hz): a robot that streams would hold 20.0% of the time, behind"}),
    "a short lease beside a gateway": (lambda: run().set("config.actions", {"lease_ms": 28.0})
            .set("config.gateway", [{"wire": "openpi", "answer": "exact"}]), "FAIL SHORT_LEASE"),
    "a short lease without robots": (lambda: run().set("config.actions", {"lease_ms": 28.0})
            .set("config.service", {"endpoint": None}), "PASS"),
    "a short lease of a recording": (lambda: run().set("config.actions", {"lease_ms": 28.0})
            .set("config.service", {"endpoint": "x", "recording": "y.mcap"}), "PASS"),
    "a short lease, judged in service": (lambda: served(stages())
            .set("config.actions", {"lease_ms": 28.0}), "PASS", {"with": {"phase": "ready"}}),
    "a lease below the sensors' period": (lambda: run().set("config.actions", {"lease_ms": 68.0})
            .set("config.streams", [{"name": "joints", "rate_hz": 20.0}]), "FAIL SHORT_LEASE",
        {"says": "actions are 20.0 ms old when they are made (p95), and the next ones come with "
            "the next sample, 50.0 ms later: robots need 70.0 ms, and actions.lease_ms is 68; set "
            "actions.lease_ms to 77"}),
    "a lease above the sensors' period": (lambda: run().set("config.actions", {"lease_ms": 70.0})
            .set("config.streams", [{"name": "joints", "rate_hz": 20.0}]), "PASS"),
    "a lease that every other chunk outlives": (lambda: run(EVERY_OTHER_SLOW)
            .set("config.actions", {"lease_ms": 150.0}), "FAIL SHORT_LEASE",
        {"says": "actions are 100 ms old when they are made (p95), and the next ones come 20.0 ms "
            "later (p50), some later still: robots need 180 ms, and actions.lease_ms is 150"}),
    "a lease that few chunks outlive for long": (lambda: run(ONE_IN_80_SLOW)
            .set("config.actions", {"lease_ms": 60.0}), "FAIL SHORT_LEASE",
        {"says": "SHORT_LEASE: robots would hold 9.4% of the time, behind 12 of 380"}),
    "a lease that few chunks outlive": (lambda: run(FEW_SLOW)
            .set("config.actions", {"lease_ms": 45.0}), "PASS",
        {"says": "by bring-up's chunks robots would hold 0.9% of the time, behind 3 of 381 chunks "
            "(limit 5% of each): the latest needs a lease of 60.0 ms; mend what stalls the policy "
            "or the machine, or set actions.lease_ms to 66, a tenth to spare"}),
    "the same with slow sensors": (lambda: run(EVERY_OTHER_SLOW)
            .set("config.actions", {"lease_ms": 275.0})
            .set("config.streams", [{"name": "joints", "rate_hz": 5.0}]), "FAIL SHORT_LEASE",
        {"says": "actions are 90.0 ms old when they are made (p95), and the next ones come with "
            "the next sample, 200 ms later: robots need 290 ms"}),
    "held for want of a lease": (lambda: served(stages()).set("config.actions", {"lease_ms": 28.0})
            .set("config.streams", [{"name": "joints", "max_request_hz": 5.0}])
            .tell(robot(held_ns=ms(500), faults=9)),
        "INCONCLUSIVE SERVICE_HELD",
        {"says": "9 faults; actions are 20.0 ms old when they are made (p95), and the next ones "
            "come 10.0 ms later (p50): robots need 30.0 ms, and actions.lease_ms is 28"}),
    # ---- time without a name ---------------------------------------------------------------------
    "waits called link calls": (lambda: unnamed(stages(t_in=13)), "INCONCLUSIVE UNNAMED_TIME",
        {"says": "rank 0 A 69%"}),
    "link calls, waited for a CPU": (lambda: unnamed(stages(t_in=13), run_delay_ns=ms(8)), "PASS"),
    "link calls, nobody knows": (lambda: unnamed(stages(t_in=13), run_delay_ns=None), "PASS"),
    "link calls, of tiny stages": (lambda: unnamed(stages(a=0.4, b=0.9, c=0.4, x=0.01, t_in=1.3)),
        "PASS"),
    # ---- the folder says otherwise than its lines ------------------------------------------------
    "logged as failed": (lambda: run().tell(said(FAIL, "LOW_OVERLAP", overlap=-0.14)),
        "INCONCLUSIVE CONTRADICTED", {"says": "verdict was FAIL LOW_OVERLAP"}),
    "logged as too few": (lambda: run().tell(said(UNKNOWN, "TOO_FEW")), "INCONCLUSIVE CONTRADICTED",
        {"says": "verdict was INCONCLUSIVE TOO_FEW"}),
    "logged with less overlap": (lambda: run().tell(said(PASS, overlap=-0.14)),
        "INCONCLUSIVE CONTRADICTED", {"says": "had overlap -0.14, its lines have 1.00"}),
    "logged as contended": (lambda: run().tell(said(PASS, "CONTENDED")),
        "INCONCLUSIVE CONTRADICTED", {"says": "verdict was PASS CONTENDED"}),
    "logged as passed": (lambda: run().tell(said(PASS)), "PASS"),
    "logged as passed, unsafe later": (
        lambda: run().tell(said(PASS)).put(at=slice(200, 201), outstanding_max=3),
        "FAIL QUEUE_BOUND"),
    "lines of another run": (lambda: run().put(1, run_id="another"),
        "INCONCLUSIVE CONTRADICTED NOT_AUDITED", {"says": "rank1 has lines of another run"}),
    # ---- service beside bring-up -----------------------------------------------------------------
    "service as quick": (lambda: served(SLOW_INPUT).tell(robot(held_ns=ms(100))), "PASS",
        {"service.verdict": PASS}),
    "service judged alone": (lambda: served(stages(t_in=13)), "INCONCLUSIVE INPUT_LIMITED",
        {"with": {"phase": "ready"}, "service.class": "input-limited"}),
    "service 6.5 times slower": (lambda: served(stages(b=65)), "INCONCLUSIVE SERVICE_SLOWER",
        {"says": "bring-up PASS, service: B took 6.5 x bring-up's 10.0 ms (65.0 ms)"}),
    "service slower, and held": (
        lambda: served(stages(b=65)).tell(robot(held_ns=ms(5200), faults=145, fault="lease")),
        "FAIL SERVICE_SLOWER SERVICE_HELD",
        {"says": "held 67% of the time, 145 faults, the newest: lease"}),
    "held in ten sessions": (
        lambda: served(SLOW_INPUT).tell(*sessions([(1e4 + 480 * k, 432) for k in range(1, 11)])),
        "INCONCLUSIVE SERVICE_HELD", {"says": "robot arm (10 sessions) held 90% of the time, 1 f"}),
    "two robots, each held for less": (
        lambda: served(SLOW_INPUT).tell(*sessions([(1e4, 432)]), *sessions([(1e4, 432)], 6, "leg")),
        "PASS"),
    "one hold that outlasts sessions": (
        lambda: served(SLOW_INPUT).tell(*sessions([(1e4 + 45 * k, 45 * k) for k in range(1, 11)])),
        "PASS", {"service.robots.9.held_ns": ms(45)}),
    "six slow envelopes": (lambda: served(stages(b=800), n=6), "INCONCLUSIVE SERVICE_SLOWER"),
    "service 1.9 times slower": (lambda: served(stages(b=19)), "PASS"),
    "thrice of next to nothing": (
        lambda: served(stages(0.4, 1.2, 0.4, 0.01), bring_up=run(stages(0.2, 0.4, 0.2, 0.01))),
        "PASS"),
    "service drops": (lambda: served(stages()).put(at=slice(330, None, 5), drop="expired"),
        "INCONCLUSIVE SERVICE_DROPPED", {"says": "24 of 120 envelopes dropped: 24 expired"}),
    "an old action": (lambda: served(stages()).set("config.actions", {"max_age_ms": 90})
            .tell(*chunks([(ms(40), 5, ms(700)), (ms(40), 5, ms(80))])),
        "INCONCLUSIVE SERVICE_TOO_OLD", {"says": "executed an action 700 ms old, of 90.0 ms"}),
    "no old action": (lambda: served(stages()).set("config.actions", {"max_age_ms": 90})
            .tell(*chunks([(ms(40), 5, ms(90))])), "PASS"),
    "late chunks": (lambda: served(stages()).set("config.actions", {"lease_ms": 90.0})
            .tell(*chunks([(ms(98), 0, 0)] * 11 + [(ms(40), 0, 0)] * 9 + [(ms(40), 1, 0)] * 80)),
        "INCONCLUSIVE SERVICE_LATE", {"age_ms.max": 40,
            "says": "80 of 100 chunks; 11 came too late, 98.0 ms old (p50) of 90 allowed"}),
    "few late chunks": (lambda: served(stages()).set("config.actions", {"lease_ms": 90.0})
            .tell(*chunks([(ms(98), 0, 0)] * 10 + [(ms(40), 1, ms(41))] * 90)), "PASS"),
    "chunks past their last step": (lambda: served(stages())
            .set("config.actions", {"lease_ms": 200.0, "dt_ms": 5.0, "horizon": 4})
            .tell(*chunks([(ms(25.6), 0, 0)] * 11 + [(ms(24.9), 0, 0)] * 89)),
        "INCONCLUSIVE SERVICE_LATE",
        {"says": "0 of 100 chunks; 11 came too late, 25.6 ms old (p50) of 25 allowed"}),
    "chunks that were asked for, past their last step": (lambda: served(stages())
            .set("config.actions", {"lease_ms": 200.0, "dt_ms": 5.0, "horizon": 4})
            .set("config.streams", [{"name": "joints", "max_request_hz": 5.0}])
            .tell(*chunks([(ms(33.6), 0, 0)] * 100)), "PASS"),
    "chunks that were asked for, past their lease": (lambda: served(stages())
            .set("config.actions", {"lease_ms": 200.0, "dt_ms": 5.0, "horizon": 4})
            .set("config.streams", [{"name": "joints", "max_request_hz": 5.0}])
            .tell(*chunks([(ms(201), 0, 0)] * 100)), "INCONCLUSIVE SERVICE_LATE",
        {"says": "0 of 100 chunks; 100 came too late, 201.0 ms old (p50) of 200 allowed"}),
    "a slow loop skips chunks": (lambda: served(stages())
            .set("config.actions", {"lease_ms": 200.0, "dt_ms": 5.0, "horizon": 4})
            .tell(*chunks([(ms(24.9), 0, 0)] * 90 + [(ms(24.9), 1, ms(24.9))] * 10)), "PASS"),
    "a robot without a chunk": (lambda: unserved(robot(robot="arm")),
        "INCONCLUSIVE SERVICE_UNSERVED",
        {"says": "arm (session 5) was there for 1.0 s and got no chunk: no sample of joints came"}),
    "a robot whose samples are refused": (
        lambda: unserved(robot(robot="arm"), received=100,
            dropped={"future": 50, "late": 1, "overwritten": 49}), "INCONCLUSIVE SERVICE_UNSERVED",
        {"says": "got no chunk: 50 future, 1 late of 100 samples of joints",
            "drops.samples_by_stream.joints.future": 50}),
    "a robot whose samples are half refused": (
        lambda: unserved(robot(robot="arm"), received=100, dropped={"late": 50, "closed": 50}),
        "INCONCLUSIVE SERVICE_UNSERVED", {"service.reasons.0": "SERVICE_UNSERVED",
            "statements.0": "bring-up PASS, service: robot arm (session 5) was there for 1.0 s and "
            "got no chunk"}),
    "two robots without a chunk": (
        lambda: unserved(robot(robot="arm"), robot(robot="leg", session=6)),
        "INCONCLUSIVE SERVICE_UNSERVED",
        {"says": "arm (session 5) was there for 1.0 s and got no chunk; robot leg"}),
    "a robot that came in the last moment": (
        lambda: unserved(robot(robot="arm", t=unserved().extra[-1]["t"] - ms(299))), "PASS"),
    "a robot that left in the first moment": (
        lambda: unserved(robot(robot="arm"), event("robot_left", session=5,
            heard_ns=unserved().extra[-1]["t"] - ms(700))), "PASS"),
    "a robot that left later": (
        lambda: unserved(robot(robot="arm"), event("robot_left", session=5,
            heard_ns=unserved().extra[-1]["t"] - ms(500))),
        "INCONCLUSIVE SERVICE_UNSERVED", {"says": "was there for 0.5 s and got no chunk"}),
    "no robot came": (lambda: unserved(), "PASS"),
    "a robot, ready for less than a lease": (lambda: unserved(robot(robot="arm"), lease_ms=2000),
        "PASS"),
    "a robot, and a policy rank with another clock": (
        lambda: on_another_clock(unserved(robot(robot="arm"), lease_ms=2000)), "PASS"),
    "a robot before ready": (lambda: run().tell(robot()), "PASS"),
    "a robot that asked for nothing": (lambda: unserved(robot()).set("config.streams",
        [{"name": "joints", "max_request_hz": 5.0}]), "PASS"),
    "unsafe, and held": (lambda: (served(stages()).put(at=slice(30, 31), outstanding_max=3)
            .tell(robot(held_ns=ms(1000)))), "FAIL QUEUE_BOUND SERVICE_HELD"),
    # ---- safety counts ---------------------------------------------------------------------------
    "two over the bound, warming": (
        lambda: run().put(at=slice(3, 4), outstanding_max=4, phase="warming"), "FAIL QUEUE_BOUND",
        {"says": "a queue ran 2 over its bound"}),
    "no counter": (lambda: run().lose("outstanding_max"), "PASS"),
    "no counter, over the bound": (lambda: run().lose("outstanding_max").set("topology.d_in", 1),
        "FAIL QUEUE_BOUND BAD_INSTRUMENT | credit", {"says": "a queue ran 1 over its bound"}),
    "emits of an ended epoch": (
        lambda: run().tell(event("epoch_cut", epoch=1, t=run().lines[300]["tEmit"])),
        "FAIL STALE_EMIT", {"says": "29 actions of an ended epoch"}),
    "ended epoch, dropped": (
        lambda: (run().tell(event("epoch_cut", epoch=1, t=run().lines[300]["tEmit"]))
            .put(at=slice(301, None), drop="stale")), "PASS"),
    "ended epoch, no event": (lambda: (run(n=330).put(at=slice(60, None), epoch=1)
            .put(at=slice(59, 60), tEmit=run().lines[70]["tEmit"] + 1)),
        "FAIL STALE_EMIT BAD_INSTRUMENT | stamps", {"says": "emitted 1 action of an ended epoch"}),
    "emitted twice": (twice, "FAIL ORDER", {"says": "emitted 1 action out of order or twice"}),
    "emits swapped": (swapped, "FAIL ORDER BAD_INSTRUMENT | order"),
    "older than its lease": (lambda: leased("ready"), "FAIL EXPIRED_EMIT",
        {"with": {"phase": "ready"}}),
    "older than its lease, in bring-up": (lambda: leased("bring-up"), "PASS"),
    "older than its lease, dropped": (lambda: leased("ready").put(drop="expired"),
        "INCONCLUSIVE EXPIRED SERVICE_DROPPED", {"with": {"phase": "ready"}}),
    "older than its lease, replayed": (
        lambda: leased("ready").set("config.pipeline.windows", "scheduled"), "PASS",
        {"with": {"phase": "ready"}}),
    # ---- what each audit catches -----------------------------------------------------------------
    "no credit wait": (lambda: run(form=ONE_CREDIT).put(w_credit_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(r0A)"),
    "no result wait": (lambda: run(form=SPLIT).put(w_result_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(r0C)"),
    "no credit wait, one thread": (lambda: run(form=JUST_IN_TIME).put(w_credit_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(r0)"),
    "time in link calls": (
        lambda: (run(form=ONE_CREDIT).add(w_credit_ns=-1, busy_link_ns=1, wait_input_ns=-2)
            .add(1, wait_input_ns=-2, busy_link_ns=2)), "PASS"),
    "link calls not told": (lambda: run(form=ONE_CREDIT).add(w_credit_ns=-1),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(r0A)"),
    "time beside C": (lambda: run(form=SPLIT).add(w_result_ns=-1, busy_link_c_ns=1), "PASS"),
    "time beside C, not told": (lambda: run(form=SPLIT).add(w_result_ns=-1),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation(r0C)"),
    "gap without rank 1": (lambda: run(form=ONE_CREDIT).add(wait_input_ns=-2).lose(rank=1),
        "INCONCLUSIVE NOT_AUDITED"),
    "gap too short": (lambda: run(form=ONE_CREDIT).add(wait_input_ns=-2, idle_ns=-2).lose(rank=1),
        "INCONCLUSIVE BAD_INSTRUMENT NOT_AUDITED | conservation(mesh)"),
    "outstanding integral": (lambda: run(form=SPLIT)
            .put(outstanding_ns_total=lambda line: round(line["outstanding_ns_total"] * 0.9)),
        "INCONCLUSIVE BAD_INSTRUMENT | little(outstanding)"),
    "decode queue integral": (lambda: run(SLOW_C, SPLIT)
            .put(q_decode_ns_total=lambda line: round(line["q_decode_ns_total"] * 0.9)),
        "INCONCLUSIVE BAD_INSTRUMENT | little(q_decode)"),
    "depth 8, 130 envelopes": (lambda: run(form=PipelineForm("split", d_in=8, d_out=8), n=130),
        "PASS", {"audits.little.ok": True}),
    "depth 8, wrong integral": (lambda: run(form=PipelineForm("split", d_in=8, d_out=8), n=130)
            .put(outstanding_ns_total=lambda line: line["tEmit"] * 7),
        "INCONCLUSIVE BAD_INSTRUMENT | little"),
    "busier than time": (lambda: run(form=SPLIT).put(B_ns=ms(10.5)).lose(rank=1),
        "INCONCLUSIVE BAD_INSTRUMENT NOT_AUDITED | conservation; bounds(mesh); outstanding"),
    "device region over its B": (lambda: run(form=SPLIT).put(eB_ns=ms(11)),
        "INCONCLUSIVE BAD_INSTRUMENT | bounds"),
    "B over its residence": (
        lambda: run(form=ONE_CREDIT).put(B_ns=lambda line: line["residence_ns"] + ms(1)),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation; residence; stamps"),
    "residence over its trip": (lambda: run(form=ONE_CREDIT)
            .put(residence_ns=lambda line: line["tRecv"] - line["tSend"] + ms(1)),
        "INCONCLUSIVE BAD_INSTRUMENT | residence"),
    "mesh busy with nothing": (
        lambda: run(form=IN_TURN).put(B_ns=lambda line: line["B_ns"] + line["wait_input_ns"]),
        "INCONCLUSIVE BAD_INSTRUMENT CONTENDED | conservation; residence; outstanding; stamps"),
    "sampled outstanding": (lambda: run().put(outstanding=lambda line: line["outstanding"] - 1),
        "INCONCLUSIVE BAD_INSTRUMENT | outstanding(sampled)"),
    "received, counted late": (received_late, "PASS"),
    "commit before its credit": (lambda: run(form=ONE_CREDIT).add(tSend=-1, tA1=-1, tA0=-1, tRx=-1),
        "INCONCLUSIVE BAD_INSTRUMENT | little; credit"),
    "decode before receipt": (
        lambda: run(form=ONE_CREDIT).put(tDecode=lambda line: line["tRecv"] - ms(1)),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation; order; credit"),
    "C over C": (lambda: run(form=ONE_CREDIT).add(tEmit=11),
        "INCONCLUSIVE BAD_INSTRUMENT CONTENDED | conservation; bounds; credit"),
    "prebuilt": (lambda: run(form=PREBUILT), "PASS"),
    "prebuilt, commit before its credit": (lambda: run(form=PREBUILT).add(tSend=-1),
        "INCONCLUSIVE BAD_INSTRUMENT | little; credit"),
    "prebuilt, called just in time": (
        lambda: run(form=PREBUILT).set("topology.credit", "before_window"),
        "INCONCLUSIVE BAD_INSTRUMENT | credit"),
    "receipt without a decode slot": (lambda: run(SLOW_C, SPLIT).add(tRecv=-2),
        "INCONCLUSIVE BAD_INSTRUMENT | little; residence; credit"),
    "A and C at once on one thread": (lambda: run(form=SPLIT).set("topology.threads", "serial"),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation; credit"),
    "stamps backwards": (lambda: run().put(at=slice(100, 101), tA1=lambda line: line["tA0"] - 1),
        "INCONCLUSIVE BAD_INSTRUMENT | order"),
    "A before its input": (lambda: run(SLOW_INPUT, SPLIT)
            .put(tA0=lambda line: line["tA0"] - line["w_input_ns"], w_input_ns=0),
        "INCONCLUSIVE BAD_INSTRUMENT CONTENDED | order(newest sample)"),
    "sample slips in": (
        lambda: run().put(at=slice(0, None, 10), tRx=lambda line: line["tA0"] + ms(0.2)), "PASS"),
    "20 µs backwards": (lambda: run(form=SPLIT).put(tA1=lambda line: line["tSend"] + 20_000),
        "INCONCLUSIVE BAD_INSTRUMENT | order"),
    "20 µs backwards, device's clock": (
        lambda: (run(form=SPLIT).put(tA1=lambda line: line["tSend"] + 20_000)
            .set(*DEVICE)), "PASS"),
    "B is not rank 1's": (lambda: run(form=SPLIT).add(B_ns=-1),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation; stamps; cpu"),
    "rank 1 a little behind": (lambda: run(n=130).lose(rank=1, at=slice(-5, None)), "PASS"),
    "rank 1 misses ten": (lambda: run(n=130).lose(rank=1, at=slice(100, 110)),
        "INCONCLUSIVE BAD_INSTRUMENT | stamps(policy rank missing)"),
    "ten lines taken out": (lambda: taken_out(renumbered=False),
        "INCONCLUSIVE BAD_INSTRUMENT | ledger(10 lines of envelopes are missing)"),
    "ten lines taken out, numbered anew": (lambda: taken_out(renumbered=True),
        "INCONCLUSIVE BAD_INSTRUMENT | conservation; ledger"),
    "full disk in service": (full_disk, "INCONCLUSIVE MISSING_LOGS",
        {"says": "bring-up PASS, service: 563 lines of envelopes are missing in service"}),
    "full disk in all of a service that ended": (
        lambda: full_disk().tell(event("phase", phase="draining", t=ms(9999)))
            .set("finished_utc", "then"), "INCONCLUSIVE MISSING_LOGS",
        {"says": "bring-up PASS, service: 570 lines of envelopes are missing in service"}),
    "killed, with its last lines unwritten": (lambda: killed_in_service(tail=7), "PASS"),
    "killed, behind a full disk for a time": (
        lambda: killed_in_service(hole=50), "INCONCLUSIVE MISSING_LOGS",
        {"says": "bring-up PASS, service: 50 lines of envelopes are missing in service"}),
    "killed, behind a full disk to the end": (
        lambda: killed_in_service(tail=50), "INCONCLUSIVE MISSING_LOGS",
        {"says": "bring-up PASS, service: 43 lines of envelopes are missing in service"}),
    "full disk in service, to the end": (lambda: full_disk().set("finished_utc", "then"),
        "INCONCLUSIVE MISSING_LOGS", {"says": "bring-up PASS, service: the log has no end of the"}),
    "full disk in service, for a time": (
        lambda: disk_full_for_a_time(50), "INCONCLUSIVE MISSING_LOGS",
        {"says": "bring-up PASS, service: 50 lines of envelopes are missing in service"}),
    "full disk in service, for a moment": (lambda: disk_full_for_a_time(2), "PASS"),
    "full disk, and a robot that held": (
        lambda: disk_full_for_a_time(50).tell(robot(held_ns=ms(1000))),
        "INCONCLUSIVE SERVICE_HELD MISSING_LOGS"),
    "unbalanced ledger": (unbalanced,
        "INCONCLUSIVE BAD_INSTRUMENT | ledger(envelopes do not balance by +1)"),
    "A: more CPU than time": (lambda: run().add(cpu_a_ns=1), "INCONCLUSIVE BAD_INSTRUMENT | cpu"),
    "C: more CPU than time": (lambda: run().add(cpu_c_ns=1), "INCONCLUSIVE BAD_INSTRUMENT | cpu"),
    "19 ms of CPU in 10, 2 CPUs": (lambda: run().tell(machine(2)), "PASS"),
    "19 ms of CPU in 10, 1.5 CPUs": (lambda: run().tell(machine(1.5)),
        "INCONCLUSIVE BAD_INSTRUMENT | cpu(all over 1.5 CPUs)"),
    "equal stamps": (lambda: run().put(**dict.fromkeys(STAMPS, 7)), "INCONCLUSIVE NOT_WARM",
        {"audits.order.ok": None, "audits.credit.ok": None}),
    # ---- the score by the stages' times alone ----------------------------------------------------
    "one CPU": (lambda: alone(run(stages(0.6, 37.5, 35)), 0.6, 20.7, 16.4), "FAIL CONTENDED",
        {"primary.S": 1, "primary.S_alone": 0.01, "says": "B 1.81"}),
    "one lock": (lambda: alone(run(stages(0.7, 21, 20)), 0.7, 12.7, 10.4), "FAIL CONTENDED",
        {"primary.S": 0.983, "primary.S_alone": 0.22}),
    "one interpreter": (lambda: alone(run(stages(17, 5, 17), SPLIT), 8.6, 4.7, 9), "FAIL CONTENDED",
        {"primary.S": 1, "primary.S_alone": -0.86}),
    "honest": (lambda: alone(run(), 4, 9.8, 5), "PASS", {"primary.S": 1, "primary.S_alone": 0.98}),
    "honest, split": (lambda: alone(run(stages(10, 11, 9), SPLIT), 9.8, 11, 9), "PASS",
        {"primary.S": 1, "primary.S_alone": 1}),
    "in turn, by D_in": (lambda: run(form=ONE_CREDIT), "PASS", {"primary.S_alone": 0.444}),
    "A and C contend": (lambda: alone(run(stages(18, 9.5, 18), SPLIT), 9, 9.5, 9),
        "FAIL CONTENDED"),
    "A and C contend, of one device": (lambda: alone(run(stages(18, 9.5, 18), SPLIT), 9, 9.5, 9)
            .set(*DEVICE), "PASS"),
    "slow clocks alone": (lambda: alone(run(), 40, 100, 50), "PASS", {"primary.S_alone": 1}),
    "slow behind": (
        lambda: alone(alone(run(stages(8, 20, 10)), 4, 10, 5), 8, 20, 10, key="standalone_after"),
        "FAIL CONTENDED", {"says": "B alone took 2.00 x as long"}),
    "mean of both": (lambda: alone(alone(run(), 4, 9, 5), 4, 10, 5, key="standalone_after"), "PASS",
        {"alone.times_ms.B": 9.5, "primary.strict": 1.0526}),
    "period below the slowest alone": (lambda: alone(run(), 4, 10.5, 5), "PASS",
        {"says": ["the period is 0.952"]}),
    "waits for a CPU, two of them": (
        lambda: cpu(run(stages(0, 20, 20)), 12, 12, 8).tell(machine(2, others_cpus=1.0)), "PASS",
        {"primary.S_alone": 0.975}),
    "waits for a CPU, or for a lock": (
        lambda: cpu(run(stages(0, 20, 20)), 10, 10, 10).tell(machine(2, others_cpus=1.0)),
        "FAIL CONTENDED", {"primary.S_alone": -0.05,
        "says": "their work alone fits into the period in turn, so that waits for a CPU prove "
                "nothing: end other programs"}),
    "waits for a CPU, one": (
        lambda: cpu(run(stages(0, 20, 20)), 10, 10, 10).tell(machine(1, others_cpus=1.0)),
        "FAIL CONTENDED", {"primary.S_alone": -0.05,
        "says": "on 1 usable CPU, 0% stolen, other programs take 1.0: 2 threads work at the same "
                "time and share them"}),
    "waits for a CPU, both on 0": (lambda: cpu(run(stages(0, 20, 20)), 10, 10, 10)
            .tell(machine(2, others_cpus=1.0, thread_cpus={"r0": [0], "mesh": [0]})),
        "FAIL CONTENDED", {"says": "rank 0 and policy rank may use CPU 0 only, and share it"}),
    "waits for a CPU, one on both": (lambda: cpu(run(stages(0, 20, 20)), 12, 12, 8)
            .tell(machine(2, others_cpus=1.0, thread_cpus={"r0": [0, 1], "mesh": [0]})), "PASS"),
    "waits for a CPU, no list": (lambda: cpu(run(stages(0, 20, 20)), 12, 12, 8)
            .tell(machine(2, others_cpus=1.0, thread_cpus={"r0": "?", "mesh": []})), "PASS"),
    "others ran meanwhile": (lambda: busy(others_cpus=0.7), "PASS",
        {"primary.S_alone": 1}),
    "nobody else ran": (lambda: busy(), "FAIL CONTENDED"),
    "others ran a tenth of it": (lambda: busy(others_cpus=0.07), "FAIL CONTENDED",
        {"says": "other programs take 0.1"}),
    "it was a lock": (lambda: cpu(busy(others_cpus=0.7), 4, 10, delay_a_ns=0), "FAIL CONTENDED"),
    "lock, more work alone": (lambda: first_alone(locked(), (0.5, 21, 20), 0), "FAIL CONTENDED",
        {"primary.S_alone": 0.024, "says": ["B worked or slept", "C worked or slept"]}),
    "lock, waits alone": (lambda: first_alone(locked(), (0.5, 11, 10), 10), "FAIL CONTENDED",
        {"primary.S_alone": 0.024}),
    "lock, busier alone": (lambda: first_alone(locked(30, 29, late=4), (0.5, 11, 10), 19)
            .tell(machine(2, others_cpus=1.0)), "FAIL CONTENDED", {"primary.S_alone": -0.833}),
    "too few CPUs": (lambda: cpu(run(), 0, 0, cpu_a_ns=0).tell(machine(1)), "PASS",
        {"says": "this machine in bring-up"}),
    "too few CPUs, no bring-up": (lambda: cpu(run(phase="ready"), 0, 0, cpu_a_ns=0)
            .tell(machine(1)), "PASS", {"says": "this machine: load"}),
    "nothing to hide alone": (lambda: alone(run(stages(2, 20, 2)), 0.2, 20, 0.2),
        "INCONCLUSIVE NOTHING_TO_HIDE"),
    "B timed again behind": (b_alone_behind, "PASS", {"n": 319}),
    "long links, one credit": (lambda: run(stages(2, 5, 4, x=6), PipelineForm(d_in=1)),
        "FAIL LOW_OVERLAP"),
    "long links in B": (links_in_b, "FAIL CONTENDED", {"primary.S": 0.667}),
    "not timed alone": (lambda: unset("standalone"), "INCONCLUSIVE NOT_AUDITED",
        {"says": "alone: run.json has no isolated stage times", "primary.strict": None}),
    # ---- advice ----------------------------------------------------------------------------------
    "policy sets": (run, "PASS", {"says": ["the policy sets", "only a faster B helps",
        "period 10.0 ms = 1.00 x max(stage), overlap 1.00 [1.00, 1.00] at D_in/D_out = 2/2"]}),
    "deep enough": (lambda: run(stages(a=9.2), SPLIT), "PASS",
        {"says": "3 would gain 1%, less than the model can resolve, for actions 9.80 ms older"}),
    "deep enough, 10 µs": (lambda: run(stages(a=0.2, b=0.2, c=0.1, x=0.01), SPLIT), "PASS",
        {"says": "3 would gain 5%, less than the model can resolve, for actions of the same age"}),
    "deep enough, jittered": (lambda: run(jittered(stages(a=9.8), 400, seed=1), SPLIT), "PASS",
        {"says": "3 would gain 4%, less than the model can resolve"}),
    "B dominates": (lambda: run(stages(1, 50, 6)), "PASS",
        {"says": "D_in 2 lets envelopes wait for the policy: pipeline.d_in = 1 would make actions "
            "41.0 ms younger, for 4% fewer of them"}),
    "B dominates, and A": (lambda: run(stages(3.9, 50, 1.2)), "PASS",
        {"says": "younger, for 9% fewer of them; if the gate refuses that, one rank (--nproc 1)"}),
    "B dominates, one credit": (lambda: run(stages(1, 50, 6), JUST_IN_TIME), "PASS",
        {"says": "D_in 1 is deep enough: 2 would gain 4%, for actions 41.0 ms older"}),
    "too deep": (lambda: run(form=PipelineForm(d_in=4)), "PASS", {"says": "D_in 4 is 2 too deep"}),
    "waits for D_out": (
        lambda: run(SLOW_C, PipelineForm("split", d_in=4, d_out=4)).put(residence_ns=ms(10)),
        "PASS", {"model.formula": "C", "model.gap": 0}),
    # ---- ages and counts -------------------------------------------------------------------------
    "ages of robots": (lambda: run().tell(*chunks([(ms(30 + k % 3), 1, 0) for k in range(1200)])),
        "PASS", {"age_ms": {"p50": 31, "p95": 32, "p99": 32, "max": 32}}),
    "ages of executed chunks": (lambda: run().tell(*chunks([(ms(20), 3, 0), (ms(90), 0, 0)])),
        "PASS", {"age_ms.max": 20}),
    "oldest action": (
        lambda: (run().tell(*chunks([(ms(20), 3, o) for o in (31_000_000, 41_260_000, 0)]))
            .set("config.actions", {"lease_ms": 90.0, "max_age_ms": 60.0})),
        "PASS", {"oldest_action_ms": {"age": 41.26, "limit": 60}}),
    "impossible ages": (lambda: run()
            .tell(*chunks([(ms(30), 3, ms(40)), (-(2**62), 3, ms(40)), (2**62, 3, ms(40)), (ms(30),
            3, -1)]), robot(held_ns=-5)), "PASS", {"age_ms.max": 30, "oldest_action_ms.age": 40,
        "says": "4 robot reports left out"}),
    "ledger, nested": (lambda: run()
            .tell({"kind": "ledger", "streams": {"camera": JOINT, "joint": JOINT}},
            {"kind": "ledger", "streams": {"camera": CAMERA, "joint": JOINT}}), "PASS", LATE),
    "ledger, by stream": (lambda: run()
            .tell({"kind": "ledger", "stream": "camera"} | CAMERA, {"kind": "ledger",
            "stream": "joint"} | JOINT), "PASS", LATE),
    "service of a slow robot": (slow_service, "INCONCLUSIVE INPUT_LIMITED LOW_OVERLAP",
        {"with": {"phase": "ready"}, "service.class": "input-limited", "service.deadline.misses": 2,
        "service.deadline.longest_run": 2, "service.utilisation.mesh": 0.25,
        "service.drops.envelopes": {"expired": 2}}),
}
# fmt: on


@pytest.mark.parametrize("name", TABLE)
def test_report_of_a_log(name: str) -> None:
    check(TABLE[name])
