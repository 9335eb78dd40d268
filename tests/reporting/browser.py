"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no websocket.

with Browser() as browser:
    browser.open("file:///…/report.html")
    browser.evaluate("document.title")
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LIMIT_SECONDS = 120.0  # only a hang takes so long


def need_browser() -> str:
    """Whoever may install packages has no reason to leave these tests out, and CI may not."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    words = f"none of {', '.join(PROGRAMS)} is on this machine; `make browser` installs one"
    if os.environ.get("CI") or os.geteuid() == 0:
        pytest.fail(words)
    pytest.skip(words)


class Browser:
    """One page of a browser of its own, without network but for 127.0.0.1."""

    def __init__(self, program: str, width: int = 1180, height: int = 900) -> None:
        self._profile = tempfile.mkdtemp(prefix="overland-browser-")
        hear, answer = os.pipe()
        ask, self._ask = os.pipe()
        words = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={self._profile}", "about:blank",
        ]  # fmt: skip
        # The browser reads what it is asked from 3, and answers on 4; neither may be one of ours.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (ask, answer)]
        nothing = [(os.POSIX_SPAWN_OPEN, end, os.devnull, os.O_RDWR, 0) for end in (0, 1, 2)]
        pipes = [(os.POSIX_SPAWN_DUP2, end, 3 + place) for place, end in enumerate(theirs)]
        self._pid = os.posix_spawn(program, words, os.environ, file_actions=[*nothing, *pipes])
        for end in (ask, answer, *theirs):
            os.close(end)
        self._hear, self._rest, self._number = hear, b"", 0
        self.said: list[str] = []
        """What the page wrote to the console: errors, refusals of its policy."""
        self._session = ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._hear)
        os.close(self._ask)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._hear], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self._hear, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser says nothing")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.said.append(told["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.said.append(json.dumps(told["args"]))

    def open(self, address: str) -> None:
        self.said.clear()
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        wait_until(lambda: self.evaluate(expression), expression)

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=mobile)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def move(self, x: float, y: float, kind: str = "mouseMoved", pressed: bool = False) -> None:
        button = "left" if pressed or kind != "mouseMoved" else "none"
        clicks = 0 if kind == "mouseMoved" else 1
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button,
                  buttons=int(pressed), clickCount=clicks)  # fmt: skip

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.move(*start)
        self.move(*start, "mousePressed", pressed=True)
        self.move((start[0] + end[0]) / 2, end[1], pressed=True)
        self.move(*end, pressed=True)
        self.move(*end, "mouseReleased")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, clip: tuple[float, float, float, float] | None = None) -> None:
        options: dict[str, Any] = {"captureBeyondViewport": True}
        if clip is not None:
            x, y, width, height = clip
            # Beyond it, the page is laid out again, and the mouse leaves what it is over.
            options["captureBeyondViewport"] = y + height > self.evaluate("innerHeight")
            options["clip"] = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        data = self.send("Page.captureScreenshot", format="png", **options)["data"]
        path.write_bytes(base64.b64decode(data))
