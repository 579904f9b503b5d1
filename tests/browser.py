"""A headless Chromium for tests, over the pipe of its DevTools protocol: no driver, no socket, no port."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-sync",
    "--no-default-browser-check",
    "--mute-audio",
)


def executable() -> str | None:
    """Where Chromium is: CACHEMGR_TEST_CHROMIUM, or on PATH."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = (shutil.which(name) for name in names)
    return os.environ.get("CACHEMGR_TEST_CHROMIUM") or next((path for path in found if path), None)


class Browser:
    """One page of a browser."""

    def __init__(self, to: int, from_: int) -> None:
        self._to, self._from = to, os.fdopen(from_, "rb", buffering=0)
        self._rest, self._number = b"", 0
        self._session = ""
        self.failures: list[str] = []
        """What the page was refused, or complained about."""
        self.asked: list[str] = []
        """The URLs of all requests."""
        self._loaded = False
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Accessibility", "Network"):
            self._call(f"{domain}.enable", {})

    def close(self) -> None:
        os.close(self._to)
        self._from.close()

    def _call(self, method: str, parameters: Mapping[str, object]) -> Any:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = self._from.read(1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _zero, self._rest = self._rest.partition(b"\0")
        told = json.loads(message)
        if told.get("method") == "Log.entryAdded":
            self.failures.append(told["params"]["entry"]["text"])
        if told.get("method") == "Network.requestWillBeSent":
            self.asked.append(told["params"]["request"]["url"])
        if told.get("method") == "Page.loadEventFired":
            self._loaded = True
        return told

    def open(self, url: str) -> None:
        """Show a page, loaded."""
        self._loaded = False
        self._call("Page.navigate", {"url": url})
        self._wait_until_loaded()

    def _wait_until_loaded(self) -> None:
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """What an expression is in the page, or what it promises; the page's own policy does not bind us."""
        told = self._call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def html(self) -> str:
        """The document as it is, asked without a script."""
        root = self._call("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        found: str = self._call("DOM.getOuterHTML", {"nodeId": root})["outerHTML"]
        return found

    def type(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.focus(selector)
        self._call("Input.insertText", {"text": text})

    def focus(self, selector: str) -> None:
        root = self._call("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
        node = self._call("DOM.querySelector", {"nodeId": root, "selector": selector})["nodeId"]
        assert node, f"no {selector}"
        self._call("DOM.focus", {"nodeId": node})

    def press(self, key: str) -> None:
        """Press a key: Enter, Tab."""
        codes = {"Enter": (13, "\r"), "Tab": (9, "\t")}
        code, text = codes[key]
        common: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", "text": text, **common})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **common})

    def submit(self, selector: str) -> None:
        """Press Enter in a field, and wait for the page that follows."""
        self.focus(selector)
        self._loaded = False
        self.press("Enter")
        self._wait_until_loaded()

    def scripts(self, *, allowed: bool) -> None:
        """Whether pages may run scripts."""
        self._call("Emulation.setScriptExecutionDisabled", {"value": not allowed})

    def appearance(self, scheme: str, width: int = 1200) -> None:
        """`light` or `dark`, and the width of the window."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def headers(self, **more: str) -> None:
        """Headers of every request from now on."""
        self._call("Network.setExtraHTTPHeaders", {"headers": more})

    def picture(self, path: Path) -> bytes:
        """A screenshot of the whole page, as PNG."""
        data = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})["data"]
        path.write_bytes(base64.b64decode(data))
        return path.read_bytes()

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told of."""
        nodes = self._call("Accessibility.getFullAXTree", {})["nodes"]
        told = [node for node in nodes if not node["ignored"]]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in told]


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """A browser with a profile of its own, which ends."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium here; CACHEMGR_TEST_CHROMIUM names one")
    theirs_in, to = os.pipe()
    from_, theirs_out = os.pipe()

    def place() -> None:
        os.dup2(theirs_in, 103)
        os.dup2(theirs_out, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *_FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, "HOME": profile},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place,  # noqa: PLW1509 - four system calls
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            browser = Browser(to, from_)
            yield browser
            browser.close()
        finally:
            process.kill()
            process.wait()
