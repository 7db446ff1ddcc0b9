"""A real browser without a window, for tests: Chromium over its debugging pipe, nothing installed.

Chrome DevTools Protocol: JSON messages, each ended by a zero byte, on descriptors 3 and 4. Only
what tests of pages need: open a file, read what its console and network said, take pictures.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S: Final = 60.0  # for one answer
MISSING: Final = f"no browser: install one of {', '.join(NAMES)}"

Message = dict[str, Any]


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with one page; none outlives the ``with`` block."""

    def __init__(self, profile: Path, *options: str) -> None:
        path = find_browser()
        assert path is not None, MISSING
        child_in, self._to = os.pipe()
        self._from, child_out = os.pipe()
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars"]
        command += ["--disable-dev-shm-usage", "--disable-background-networking", *options]
        pipes = f'exec "$0" "$@" 3</dev/fd/{child_in} 4>/dev/fd/{child_out}'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", pipes, *command],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_in)
        os.close(child_out)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        self.events: list[Message] = []

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._from)

    # ---- what tests ask ---------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self.events.clear()
        answer = self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), answer
        self._until("Page.loadEventFired")

    def emulate(self, *, scheme: str = "light", media: str = "screen", width: int = 1200) -> None:
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=feature)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> Path:
        """The whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        printed = self.call("Page.printToPDF", printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))
        return path

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value, as JSON; a promise is awaited."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[Message]:
        """Whatever the console, the log or the page itself said since ``open``."""
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event["method"] in said]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since ``open``."""
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    # ---- the pipe ---------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> Message:
        """One command and its answer."""
        self._last_id += 1
        message: Message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _until(self, method: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(event["method"] == method for event in self.events):
            self._receive(deadline)

    def _receive(self, deadline: float) -> Message:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: Message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
