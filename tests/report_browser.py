"""A headless Chromium over its debugging pipe (file descriptors 3 and 4, messages that end with a zero byte)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe")


def chromium() -> str | None:
    """The browser on this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one browser. `complaints`: everything that the page wrote to the console or could not load."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bigpool-browser-", ignore_cleanup_errors=True)
        command = [str(chromium()), *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        read_commands, self.to = os.pipe()
        self.back, write_answers = os.pipe()
        # The shell puts the two ends where Chromium looks for them.
        script = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self.answers = os.fdopen(self.back, "rb")
        self.left, self.serial, self.session = b"", 0, ""
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.to)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.answers.close()
        self.folder.cleanup()

    def ask(self, method: str, **parameters: Any) -> Any:
        """Sends a command and waits for its answer."""
        self.serial += 1
        message = {"id": self.serial, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.serial:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Shows a file at a width in pixels, in a colour scheme; `media` "print" as on paper."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=file.absolute().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"])

    def _next(self) -> Any:
        while b"\0" not in self.left:
            more = os.read(self.back, 1 << 16)
            assert more, "the browser has ended"
            self.left += more
        text, _, self.left = self.left.partition(b"\0")
        answer = json.loads(text)
        if answer.get("method") in (
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Network.loadingFailed",
        ):
            self.complaints.append(json.dumps(answer["params"])[:400])
        return answer
