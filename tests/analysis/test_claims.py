"""The claims audit: wrong arithmetic is caught, right arithmetic passes, nonsense is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import claims_audit
import pytest

from ppstream.analysis.claims import RULES, audit_claims, claims_of
from ppstream.core.errors import ClaimError

CHECKOUT = Path(__file__).resolve().parents[2]


def claim(kind: str, claimed: float, **numbers: Any) -> dict[str, Any]:
    return {"kind": kind, "numbers": numbers, "claimed": claimed}


SOFTMAX = {"witness_calls": 180, "witness_per_pass": 12}
#: Each claim was published; beside it what its own numbers give.
PUBLISHED = {
    "GPU about 90 % busy": (
        claim("busy_share", 0.90, latency_share=0.107, kernel_share=0.193),
        0.554,
    ),
    "one kind of launch": (claim("shapes", 1, min=4.6, max=165.0, mean=83.4, std=78.8), 2),
    "31,200 a second": (claim("throughput", 31_200, items=256, seconds=0.410e-3), 624_390),
    "710 GB/s": (claim("bandwidth", 710e9, bytes=2.6e6, seconds=0.410e-3), 6.34e9),
    "60 % of peak, later 35.5 %": (claim("agreement", 0.1, first=0.60, second=0.355), 0.690),
    "1.20x from moving a stage": (
        claim("pipeline_gain", 1.20, before=[150.0, 180.0], after=[95.0, 180.7]),
        0.996,
    ),
    "nsys closely matches": (claim("agreement", 0.1, first=53.41, second=37.34), 0.430),
    "76 launches a pass": (claim("per_pass", 76, calls=915, **SOFTMAX), 61),
    "40.8 GFLOP": (claim("product", 40.8e9, factors=[2, 4, 12, 512, 512, 64]), 1.61e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_wrong_arithmetic_that_was_published_is_caught(name: str) -> None:
    made, right = PUBLISHED[name]
    (finding,) = audit_claims([made])
    assert not finding.holds
    assert finding.recomputed == pytest.approx(right, rel=5e-3)
    assert finding.text


@pytest.mark.parametrize("name", [n for n in PUBLISHED if PUBLISHED[n][0]["kind"] != "agreement"])
def test_the_same_claim_with_the_right_number_holds(name: str) -> None:
    made, right = PUBLISHED[name]
    assert audit_claims([made | {"claimed": right}])[0].holds


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (claim("shares", 1.0, parts=[0.6, 0.3, 0.1]), True),
        (claim("shares", 1.0, parts=[0.6, 0.3, 0.2]), False),
        (claim("shares", 1.0, parts=[0.6, 0.3]), False),
        (claim("ratio", 1.03, of=11.5, over=11.2), True),
        (claim("ratio", 1.00, of=11.5, over=11.2), False),
        (claim("agreement", 0.1, first=37.34, second=37.9), True),
        (claim("agreement", 0.9, first=53.41, second=37.34), False),  # nobody may allow more
        (claim("per_pass", 61, calls=915, passes=15), True),
        (
            claim("per_pass", 91.5, calls=915, passes=10, **SOFTMAX),
            False,
        ),  # warm-up passes left out
        (claim("shapes", 1, min=10.0, max=20.0, mean=15.0, std=2.9), True),  # uniform
        (claim("shapes", 1, min=10.0, max=10.0, mean=10.0, std=0.0), True),
    ],
)
def test_each_rule_says_yes_and_no(made: dict[str, Any], holds: bool) -> None:
    assert audit_claims([made])[0].holds is holds


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("fast", "expected {kind, numbers, claimed}"),
        ({"kind": "ratio", "claimed": 1}, "expected {kind, numbers, claimed}"),
        (claim("speed", 1), "known: throughput"),
        (claim("ratio", 1, of=1), "ratio needs numbers.over"),
        (claim("ratio", 1, of=1, over="2"), "numbers.over is '2', expected a number"),
        (claim("ratio", 1, of=1, over=0), "must be above 0"),
        (claim("ratio", True, of=1, over=1), "claimed is True"),
        (claim("ratio", float("nan"), of=1, over=1), "claimed is nan"),
        (claim("shares", 1, parts=[]), "expected a list of numbers"),
        (claim("shares", 1, parts="12"), "expected a list of numbers"),
        (claim("per_pass", 1, calls=3), "needs numbers.passes"),
        (claim("shapes", 1, min=2, max=3, mean=1, std=1), "lies outside"),
        (claim("pipeline_gain", 1, before=[1], after=[0]), "takes no time"),
    ],
)
def test_what_cannot_be_audited_is_refused_with_what_it_lacks(made: object, said: str) -> None:
    with pytest.raises(ClaimError, match=said.replace("{", r"\{").replace("}", r"\}")):
        audit_claims([made])


def test_claims_are_a_list_or_stand_in_an_object() -> None:
    assert claims_of([1]) == claims_of({"claims": [1]}) == [1]
    for other in ({}, {"claims": {}}, 3, None, "x"):
        with pytest.raises(ClaimError, match="no claims here"):
            claims_of(other)


def test_every_kind_has_a_published_or_a_made_up_case() -> None:
    tried = {made["kind"] for made, _ in PUBLISHED.values()} | {"shares", "ratio"}
    assert tried == set(RULES)


def test_tool_needs_nothing_installed_and_exits_by_what_it_found(tmp_path: Path) -> None:
    good, bad, broken = (tmp_path / name for name in ("good.json", "bad.json", "broken.json"))
    good.write_text(json.dumps({"rows": [], "claims": [claim("ratio", 2, of=4, over=2)]}))
    bad.write_text(json.dumps([made for made, _ in PUBLISHED.values()]))
    broken.write_text("{")
    tool = [sys.executable, "-S", "-E", str(CHECKOUT / "tools" / "claims_audit.py")]
    done = subprocess.run(
        [*tool, str(bad)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"{len(PUBLISHED)} claims, {len(PUBLISHED)} do not follow" in done.stdout
    assert claims_audit.main([str(good)]) == 0
    assert claims_audit.main([str(good), str(bad), "--quiet"]) == 1
    assert claims_audit.main([str(broken)]) == 3
    assert claims_audit.main([str(tmp_path / "nowhere")]) == 3
