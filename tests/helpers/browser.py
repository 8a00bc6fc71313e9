"""Headless Chromium over its DevTools protocol, through a pipe. It needs no package except the browser."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import pytest

SECONDS = 180.0  # the patience with a busy machine
_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--force-color-profile=srgb", "--lang=en"),
)


class PageError(Exception):
    """An error of the browser, or an exception of a script."""


def chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator["Browser"]:
    if (path := chromium()) is None:
        pytest.skip("there is no Chromium here: apt-get install chromium-headless-shell")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        browser = Browser(path, folder)
        try:
            yield browser
        finally:
            browser.close()


@final
class Browser:
    """A process that reads commands at descriptor 3 and writes answers and events at 4, each ended by a zero byte."""

    def __init__(self, path: str, folder: str) -> None:
        for_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # The shell gives the pipes the descriptors 3 and 4, which Chromium expects.
        command = f'exec "$@" 3<&{for_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(for_child, from_child),
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
        )
        os.close(for_child)
        os.close(from_child)
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._told = threading.Condition()
        threading.Thread(target=self._read, name="devtools", daemon=True).start()

    def page(self, width: int = 1280, height: int = 800) -> "Page":
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, target, width, height)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        with self._told:
            self._number += 1
            number = self._number
            message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            _write_all(self._out, json.dumps(message).encode() + b"\0")
            if not self._told.wait_for(lambda: number in self._answers, SECONDS):
                raise PageError(f"{method} was not answered")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(SECONDS)
        os.close(self._out)

    def _read(self) -> None:
        rest = b""
        while found := os.read(self._in, 1 << 16):
            *messages, rest = (rest + found).split(b"\0")
            with self._told:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._told.notify_all()
        os.close(self._in)


def _write_all(number: int, content: bytes) -> None:
    while content:
        content = content[os.write(number, content) :]


@final
class Page:
    """A tab. `faults` has its exceptions and logged errors, and `requests` has the requests that it made."""

    def __init__(self, browser: Browser, session: str, target: str, width: int, height: int) -> None:
        self._browser, self._session, self._target = browser, session, target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **sizes)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of an expression. A promise is awaited."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.send("Runtime.evaluate", **asked)
        if "exceptionDetails" in found:
            raise PageError(json.dumps(found["exceptionDetails"])[:1000])
        return found["result"].get("value")

    def until(self, script: str, seconds: float = SECONDS) -> Any:
        """Return the value of an expression once it is true."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if value := self.run(f"(found => found instanceof Node || found)({script})"):
                return value
            time.sleep(0.02)
        raise PageError(f"it never became true: {script}; the page has: {self.run('document.body.innerText')[:1500]}")

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        return list(self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)"))

    def key(self, key: str, *, alt: bool = False, text: str = "") -> None:
        code = f"Key{key.upper()}" if len(key) == 1 and key.isalpha() else f"Digit{key}" if key.isdecimal() else key
        numbers = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        asked = {"key": key, "code": code, "windowsVirtualKeyCode": numbers.get(key, ord(key[0].upper()))}
        typed = text or ("\r" if key == "Enter" else key if len(key) == 1 and not alt else "")
        down = {"type": "keyDown", **({"text": typed} if typed else {})}
        for event in (down, {"type": "keyUp"}):
            self.send("Input.dispatchKeyEvent", **asked, **event, modifiers=1 if alt else 0)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def place(self, selector: str) -> tuple[float, float]:
        """Return the middle of an element."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getClientRects()[0];"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        if found is None:
            raise PageError(f"there is no {selector}")
        return found[0], found[1]

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        self.hover(selector)
        self.click_at(*self.place(selector))

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose_file(self, selector: str, path: Path) -> None:
        """Set the file of an input element, as the system's dialog does."""
        found = self.send("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.send("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    def download(self, selector: str, path: Path) -> None:
        """Wait for the file that a click downloads. It has its own name, in this path's folder."""
        self._browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(path.parent))
        self.click(selector)
        ends = time.monotonic() + SECONDS
        while not path.exists():
            if time.monotonic() > ends:
                raise PageError(f"{selector} gave no {path.name}")
            time.sleep(0.02)

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    @property
    def faults(self) -> list[str]:
        """Exceptions and logged errors, except for errors of the network."""
        entries = self._told("Log.entryAdded", "entry")
        logged = [each for each in entries if each["level"] == "error" and each["source"] != "network"]
        return [json.dumps(each)[:600] for each in self._told("Runtime.exceptionThrown", "exceptionDetails") + logged]

    def _told(self, method: str, part: str) -> list[dict[str, Any]]:
        """Return this part of each event of a kind."""
        own = [each for each in self._browser.events if each.get("sessionId") == self._session]
        return [each["params"][part] for each in own if each["method"] == method]

    @property
    def requests(self) -> list[str]:
        return [each["url"] for each in self._told("Network.requestWillBeSent", "request")]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The JSON bodies of the requests to generate text, in their order."""
        asked = self._told("Network.requestWillBeSent", "request")
        return [json.loads(each["postData"]) for each in asked if each["url"].endswith("completions")]
