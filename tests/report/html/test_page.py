"""The report as a page: complete, self-contained, safe, readable, also in a real browser."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from faulty_runs import without_places
from golden_runs import GoldenRun, chain, jittered, simulate, stages
from headless_browser import MISSING, Browser, find_browser
from report_pages import Reader, complete, page

from ppstream.analysis.period_model import PipelineForm
from ppstream.report.cli import main
from ppstream.report.html.page import STYLE

SECTIONS: Final = (
    "A typical stretch",
    "Busy shares",
    "Parts of the latency",
    "Period",
    "Period over time",
    "Age of the input",
    "Age of executed actions",
    "Waits before each start",
    "Queues",
    "Queue depth",
    "On the device",
    "Memory",
    "Two scores",
    "Audits of the log",
    "Drops",
    "Service",
)


def lying() -> GoldenRun:
    run = simulate(form=PipelineForm("split", d_in=1))
    return run.bend(lambda line: line.update(tA0=line["tA0"] - line["w_credit_ns"]))


def inline() -> GoldenRun:
    run = simulate(form=PipelineForm("serial", "decode_first"))
    run.manifest["topology"]["world_size"] = 1
    return run


RUNS: Final = {
    "complete": complete,
    "split": lambda: simulate(stages(c=20), PipelineForm("split", d_in=4, d_out=4)),
    "serialized": lambda: simulate(form=PipelineForm("serial", "decode_first")),
    "input-limited": lambda: simulate(stages(t_in=40)),
    "lying": lying,
    "inline": inline,
    "three envelopes": lambda: simulate(n=3),
    "two periods": lambda: simulate(n=16),
    "chain": lambda: simulate(chain(8, 10, 6), PipelineForm("split", d_in=4)),
    "chain without logs": lambda: without_places(simulate(chain(8, 10))),
    "no policy lines": lambda: GoldenRun(simulate().manifest, simulate().lines, []),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_gives_a_well_formed_page_without_a_network(name: str) -> None:
    text = page(RUNS[name]())
    found = Reader(text)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ET.fromstring(svg)
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", text))
    assert "script" not in found.tags
    links = [value for key, value in found.attributes if key in ("src", "href", "action", "data")]
    assert all(value is not None and value.startswith("#") for value in links)
    assert not re.search(r"url\((?!#)|@import|https?:", text)
    assert "default-src 'none'" in text


def test_verdict_and_statements_come_first_and_every_picture_is_there() -> None:
    text = page(complete())
    places = [text.index("✓ PASS"), text.index("<li>"), *(text.index(f"<h2>{s}") for s in SECTIONS)]
    assert places[0] < places[1] < min(places[2:])
    assert re.search(r"period 10\.\d ms = 1\.\d\d x max\(stage\)", text)


def test_picture_of_the_stretch_shows_stages_waits_and_one_way() -> None:
    text = page(complete())
    for kind in ("a", "b", "c", "link", "wait"):
        assert f'class="{kind}"' in text, kind
    assert text.count('class="hop"') == 2
    assert "wait for the result" in text
    assert "different clocks" in text


def test_a_chain_has_a_bar_a_row_and_a_track_for_each_place() -> None:
    text = page(RUNS["chain"]())
    assert text.count('class="hop"') == 4
    for place, share in ((1, 80), (2, 100), (3, 60)):
        assert re.search(rf">place {place}: B</text>.*?>{share}%  ", text, flags=re.DOTALL)
        assert f"B{place}: part_{place}</text>" in text
    assert re.search(r'<td>place 3</td><td>part_3</td><td>cpu</td><td class="n">6\.00 ms', text)
    assert "All ranks share one clock" in text
    assert "Stamps of a policy rank are missing" in page(RUNS["chain without logs"]())


def test_too_old_input_is_marked() -> None:
    text = page(complete())
    assert re.search(r"<td>camera</td>.*?<td class=\"n bad\">13\.0 ms</td>", text)


def test_scores_apart_are_explained() -> None:
    text = page(simulate(stages(c=20), PipelineForm("split")))
    assert "the published score 5.35 is not the primary 1.00: results waited" in text
    assert "BROKEN" in page(lying())


def test_text_of_a_log_cannot_become_markup() -> None:
    run = complete()
    run.manifest |= {"run_id": "<script>x</script>", "hardware": {"cpu": "<img src=x>"}}
    run.bend(lambda line: line.update(input_age_ns={'"><u>': 1}))
    text = page(run)
    assert "<script" not in text
    assert "<img" not in text
    assert '"><u>' not in text
    assert "&lt;script&gt;" in text


def test_a_page_of_a_longer_run_is_hardly_larger() -> None:
    short, long = (page(simulate(jittered(stages(), n, 1))) for n in (400, 4000))
    assert len(long) < 1.35 * len(short)
    assert len(long) < 120_000


def test_several_runs_stand_on_one_page_with_an_index() -> None:
    text = page(simulate(), RUNS["serialized"]())
    assert text.index('href="#run0"') < text.index('href="#run1"') < text.index('id="run0"')
    assert text.index('id="run0"') < text.index('id="run1"')
    assert "✗ FAIL" in text


# ---- colours -----------------------------------------------------------------------------------

#: Linear RGB as seen without one kind of cone (Viénot, Brettel and Mollon, 1999).
BLIND: Final = {
    "protanopia": ((0.1124, 0.8876, 0.0), (0.1124, 0.8876, 0.0), (0.0040, -0.0040, 1.0)),
    "deuteranopia": ((0.2928, 0.7072, 0.0), (0.2928, 0.7072, 0.0), (-0.0223, 0.0223, 1.0)),
}


def colours(theme: str) -> dict[str, tuple[float, ...]]:
    sets = dict(zip(("light", "dark"), re.findall(r":root{(.*?)}", STYLE, re.S), strict=True))
    assert f"color-scheme:{theme};" in sets[theme]
    found = re.findall(r"--([\w-]+):#([0-9a-f]{6})\b", sets[theme])
    return {name: tuple(int(v[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, v in found}


def linear(colour: tuple[float, ...]) -> list[float]:
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour]


def contrast(one: tuple[float, ...], two: tuple[float, ...]) -> float:
    """WCAG 2: 1 is the same, 21 black on white."""
    light = sorted(
        sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))
        for c in (one, two)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_on_what_it_stands_on(theme: str) -> None:
    c = colours(theme)
    pairs = [("ink", "page"), ("ink", "card"), ("soft", "card"), ("soft", "page")]
    pairs += [(tone, f"{tone}-bg") for tone in ("pass", "fail", "open")]
    pairs += [("soft", f"{tone}-bg") for tone in ("pass", "fail", "open")]
    pairs += [("pass", "card"), ("fail", "card")]
    assert {p: contrast(c[p[0]], c[p[1]]) for p in pairs if contrast(c[p[0]], c[p[1]]) < 4.5} == {}
    bars = [("on-a", "a"), ("on-b", "b"), ("on-c", "c")]  # bold, and the tip says it again
    assert all(contrast(c[text], c[bar]) >= 3 for text, bar in bars)
    assert all(contrast(c[stage], c["card"]) >= 1.9 for stage in ("a", "b", "c", "link"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_failure_is_red(theme: str) -> None:
    found = colours(theme)
    for name in ("fail", "fail-bg"):
        red, green, blue = found[name]
        assert red > green
        assert abs(green - blue) < 0.05, name  # more green than blue is brown


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", BLIND)
def test_stages_differ_for_the_colour_blind(kind: str, theme: str) -> None:
    c = colours(theme)
    seen = {
        stage: [
            sum(w * v for w, v in zip(row, linear(c[stage]), strict=True)) for row in BLIND[kind]
        ]
        for stage in ("a", "b", "c")
    }
    for one, two in (("a", "b"), ("b", "c"), ("a", "c")):
        apart = sum((x - y) ** 2 for x, y in zip(seen[one], seen[two], strict=True)) ** 0.5
        assert apart > 0.15, (one, two, apart)


# ---- a real browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip(MISSING)
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_real_browser_shows_it_in_light_dark_print_and_narrow(
    browser: Browser, tmp_path: Path
) -> None:
    """Pictures are kept under ``PPSTREAM_TEST_ARTIFACTS`` when that is set."""
    kept = Path(os.environ.get("PPSTREAM_TEST_ARTIFACTS") or tmp_path / "pictures")
    kept.mkdir(parents=True, exist_ok=True)
    complete().write(tmp_path / "run")
    out = tmp_path / "report.html"
    main([str(tmp_path / "run"), "--html", str(out)])
    pictures = {}
    for name, look in {
        "light": {"scheme": "light"},
        "dark": {"scheme": "dark"},
        "print": {"scheme": "dark", "media": "print"},
        "narrow": {"width": 390},
    }.items():
        browser.emulate(**look)  # type: ignore[arg-type]
        browser.open(out.as_uri())
        assert browser.complaints() == []
        assert browser.requests() == [out.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        pictures[name] = browser.screenshot(kept / f"report-{name}.png")
    background = "getComputedStyle(document.body).backgroundColor"
    browser.emulate(scheme="dark")
    assert browser.evaluate(background) == "rgb(21, 23, 27)"
    browser.emulate(scheme="dark", media="print")
    assert browser.evaluate(background) == "rgb(246, 246, 244)"  # paper is never dark
    assert browser.pdf(kept / "report.pdf").read_bytes().startswith(b"%PDF")
    drawn = "[...document.querySelectorAll('svg[role=img]')].every(s=>s.getBBox().width>100)"
    assert browser.evaluate(drawn)
    assert len({path.read_bytes() for path in pictures.values()}) == 4


#: Faults that a reader sees, by the geometry of the page that is open.
SEEN: Final = """() => {
 const box = e => e.getBoundingClientRect(), found = [];
 const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
 for (const svg of document.querySelectorAll('svg[role]')) {
  const texts = [...svg.querySelectorAll('text')], name = svg.getAttribute('aria-label');
  const bars = svg.closest('.wide') ? [] : [...svg.querySelectorAll('rect')];
  texts.forEach((text, n) => {
   const here = box(text), sheet = box(svg);
   if (here.left < sheet.left - 1 || here.right > sheet.right + 1 || here.top < sheet.top - 1)
    found.push(`${name}: ${text.textContent} leaves its sheet`);
   for (const other of [...texts.slice(n + 1), ...bars])
    if (meet(here, box(other)))
     found.push(`${name}: ${text.textContent} lies on ${other.textContent || 'a bar'}`);
  });
 }
 const tiles = [...document.querySelectorAll('.figures')].map(row =>
  [...row.children].map(box));
 for (const row of tiles) {
  const right = Math.max(...row.map(b => b.right)), rows = new Map();
  row.forEach(b => rows.set(b.top, Math.max(b.right, rows.get(b.top) || 0)));
  for (const end of rows.values()) if (right - end > 1) found.push('a row of tiles has a hole');
 }
 for (const card of document.querySelectorAll('section')) {
  const last = card.lastElementChild, empty = box(card).bottom - box(last).bottom;
  if (empty > 30) found.push(`${card.firstChild.textContent}: ${empty} px stay empty`);
 }
 const small = [...document.querySelectorAll('h1,h2,td,th,p,li,b,span,small,svg text')].filter(e =>
  parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM ? e.getScreenCTM().a : 1) < 11);
 found.push(...small.map(e => `too small: ${e.textContent}`));
 if (document.documentElement.scrollWidth > innerWidth) found.push('the page is too wide');
 for (const e of document.querySelectorAll('section')) if (e.scrollWidth > e.clientWidth + 1)
  found.push(`${e.firstChild.textContent} is too wide`);
 for (const e of document.querySelectorAll('.scroll')) if (e.scrollWidth > e.clientWidth + 1
  && !getComputedStyle(e, '::before').content.includes('scroll sideways'))
  found.push(`${e.parentElement.firstChild.textContent} scrolls and does not say so`);
 return [...new Set(found)];
}"""


def test_nothing_overlaps_is_too_small_or_leaves_a_hole(browser: Browser, tmp_path: Path) -> None:
    seen = {}
    for name, make in RUNS.items():
        (tmp_path / "report.html").write_text(page(make()))
        browser.open((tmp_path / "report.html").as_uri())
        for width in (390, 720, 1200):
            browser.emulate(width=width)
            seen[name, width] = browser.evaluate(f"({SEEN})()")
    assert {look: faults for look, faults in seen.items() if faults} == {}


#: What of A4 is left within margins of 12 mm, in CSS px.
PAPER: Final = (703, 1031)
SMALLEST_PX: Final = 7.5  # of text on paper: 5.6 pt
SMALL_TEXT: Final = """[...document.querySelectorAll('td,th,p,li,span,svg text')]
 .filter(e => parseFloat(getComputedStyle(e).fontSize)
  * (e.getScreenCTM ? e.getScreenCTM().a : 1) < LIMIT).map(e => e.textContent)"""
CUT_OFF: Final = """[...document.querySelectorAll('section,section>div')]
 .filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent.slice(0, 40))"""
TALL: Final = "Math.max(...[...document.querySelectorAll('section')].map(s => s.offsetHeight))"


def test_sections_are_whole_and_legible_on_paper(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page(complete()))
    width, height = PAPER
    browser.emulate(media="print", width=width)
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.evaluate(CUT_OFF) == []  # paper has no scroll bar
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(TALL) <= height  # so none is torn between two pages
    assert browser.evaluate(SMALL_TEXT.replace("LIMIT", str(SMALLEST_PX))) == []


def test_service_is_said_to_count_against_the_run() -> None:
    assert "slower stages, holds and drops count against the run" in page(complete())


def test_dropped_samples_have_their_streams() -> None:
    golden = simulate()
    kept = {"received": 9, "used": 4, "in_flight": 0}
    imu, joints = kept | {"dropped": {"late": 5}}, kept | {"dropped": {"late": 3, "future": 2}}
    golden.tell(golden.book() | {"streams": {"imu": imu, "joints": joints}})
    text = page(golden)
    assert "samples dropped: late<small>5 of imu, 3 of joints</small>" in text
    assert "samples dropped: future<small>2 of joints</small>" in text
