"""A real browser without a window, for tests: the system's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Error, Request

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_MS: Final = 60_000  # of one step
MISSING: Final = f"no browser: install one of {', '.join(NAMES)}"


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with one page; none outlives the ``with`` block."""

    def __init__(self, profile: Path, *options: str) -> None:
        from playwright.sync_api import sync_playwright

        path = find_browser()
        assert path is not None, MISSING
        self._driver = sync_playwright().start()
        self._context = self._driver.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            args=["--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", *options],
            chromium_sandbox=False,
            device_scale_factor=1,
            timeout=LIMIT_MS,
        )
        self._context.set_default_timeout(LIMIT_MS)
        self._page = self._context.pages[0]
        self._page.on("console", self._complain)
        self._page.on("pageerror", self._complain)
        self._page.on("request", self._request)
        self._complaints: list[str] = []
        self._requests: list[str] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()
        self._driver.stop()

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self._complaints.clear()
        self._requests.clear()
        self._page.goto(url)

    def emulate(self, *, scheme: Any = "light", media: Any = "screen", width: int = 1200) -> None:
        self._page.emulate_media(media=media, color_scheme=scheme)
        self._page.set_viewport_size({"width": width, "height": 900})

    def screenshot(self, path: Path) -> Path:
        """The whole page."""
        self._page.screenshot(path=path, full_page=True)
        return path

    def pdf(self, path: Path) -> Path:
        self._page.pdf(path=path)
        return path

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value, as JSON; a promise is awaited."""
        return self._page.evaluate(expression)

    def complaints(self) -> list[str]:
        """Texts that the console or the page's own errors had since ``open``."""
        return list(self._complaints)

    def requests(self) -> list[str]:
        """Addresses that the page asked for since ``open``."""
        return list(self._requests)

    def _complain(self, found: ConsoleMessage | Error) -> None:
        self._complaints.append(found.text if isinstance(found, ConsoleMessage) else str(found))

    def _request(self, sent: Request) -> None:
        self._requests.append(sent.url)
