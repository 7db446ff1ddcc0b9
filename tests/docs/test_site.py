"""The documentation site: every page is there, can be found, and links to what exists."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest
from documents import BOOKS, ROOT
from headless_browser import MISSING, Browser, find_browser

import ppstream

SITE: Final = ROOT / "build" / "docs"
LIMIT_S: Final = 900  # of a first build on a busy machine; a later one reads what changed
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


class Page(HTMLParser):
    """The addresses that a page points to, and the places in it that others may point to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value is not None:
                self.links.append(value)
            elif key == "id" and value is not None:
                self.anchors.add(value)


def dead_links(pages: dict[Path, Page]) -> list[tuple[str, str]]:
    """Each page and link whose file or place in it is missing."""
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target in pages and unquote(parts.fragment) in pages[target].anchors
            if not there and (parts.fragment or not target.is_file()):
                found.append((path.name, link))
    return found


def is_built() -> bool:
    """Nothing that the site is made of is newer, as ``make docs`` has it."""
    index = SITE / "index.html"
    rooms = (ROOT / name for name in ("ppstream", "kernels", "stages"))
    sources = [path for room in rooms for path in room.rglob("*.py")]
    makers = (ROOT / "tools/dev" / name for name in ("make_docs.py", "conf.py"))
    inputs = [*sources, *makers, *ROOT.glob("*.md"), *BOOKS.rglob("*.*")]
    newest = max(path.stat().st_mtime for path in inputs)
    return index.exists() and index.stat().st_mtime > newest


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    if not is_built():
        build()
    return {path: Page(path) for path in SITE.rglob("*.html")}


def build() -> None:
    command = [sys.executable, str(ROOT / "tools/dev/make_docs.py"), str(SITE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_run_book_is_a_page_and_in_the_contents(pages: dict[Path, Page]) -> None:
    books = [p.stem for suffix in ("md", "ipynb") for p in BOOKS.glob(f"*.{suffix}")]
    wanted = {f"runbooks/{name}.html" for name in books}
    wanted |= {"CHANGELOG.html", "CONTRIBUTING.html", "SECURITY.html", "api/index.html"}
    assert len(wanted) > 45
    assert wanted - {str(path.relative_to(SITE)) for path in pages} == set()
    assert wanted - set(pages[SITE / "index.html"].links) == set()


def test_no_internal_link_is_dead(pages: dict[Path, Page], tmp_path: Path) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert dead_links(pages) == []
    (tmp_path / "a.html").write_text(
        '<a id="x" href="gone.html"></a><a href="#y"></a><a href="#x">'
    )
    dead = dead_links({tmp_path / "a.html": Page(tmp_path / "a.html")})
    assert dead == [("a.html", "gone.html"), ("a.html", "#y")]


def test_the_reference_has_every_public_name(pages: dict[Path, Page]) -> None:
    anchors = pages[SITE / "api/index.html"].anchors
    assert {f"ppstream.{name}" for name in ppstream.__all__} - anchors == set()


def test_the_search_index_knows_the_words_of_pages_and_code(pages: dict[Path, Page]) -> None:
    text = (SITE / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = [index["docnames"][at] for at in index["terms"]["foxglov"]]
    assert "runbooks/record-and-replay" in found
    assert "api/ppstream.view" in found


@pytest.mark.skipif(find_browser() is None, reason=MISSING)
def test_the_search_works_from_files(pages: dict[Path, Page], tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(f"{(SITE / 'search.html').as_uri()}?q=foxglove")
        titles = browser.evaluate(
            """new Promise(resolve => { const look = () => {
                const found = [...document.querySelectorAll("#search-results li a")];
                const end = document.querySelector("#search-results .search-summary");
                if (found.length > 2 && end) resolve(found.map(a => a.textContent));
                else setTimeout(look, 50);
            }; look(); })"""
        )
        assert "Watch a run live in Foxglove" in " ".join(titles)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("file:")] == []
