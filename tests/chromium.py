"""A page in headless Chromium: what it says, logs, asks for and looks like.

Chromium is spoken to over two pipes, so that neither a port nor a package is needed. `python
tests/chromium.py REPORT.html FOLDER` writes screenshots, light and dark, wide and narrow.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--disable-sync", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
    "--force-color-profile=srgb", "--disable-lcd-text",
]  # fmt: skip
# Chromium reads commands from descriptor 3 and writes to 4. Ours are first moved out of the way.
LAUNCH = """import os, sys
reading, writing = os.dup2(int(sys.argv[1]), 100), os.dup2(int(sys.argv[2]), 101)
os.dup2(reading, 3), os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60  # seconds for any one answer


class Page:
    """One page. `problems` are errors it threw or logged, `requests` the addresses it asked for."""

    def __init__(self, send, receive):
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, None
        self.problems, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path, dark=False, width=1200, height=900):
        """Load a file, or an address, and wait until it is there."""
        self.problems, self.requests = [], []
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        at = str(path) if "://" in str(path) else Path(path).resolve().as_uri()
        self.call("Page.navigate", url=at)
        self._until(lambda event: event["method"] == "Page.loadEventFired")
        return self

    def run(self, script):
        """The value of an expression of JavaScript."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, script):
        """Wait until an expression of JavaScript holds, on this page or on what it becomes."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(AssertionError):  # there may be no page at this moment
                if self.run(script):
                    return
            time.sleep(0.1)
        raise TimeoutError(script)

    def point(self, selector, across=0.5):
        """Move the pointer over an element: 0 is its left, 1 its right."""
        box = self.run(
            f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]})()"
        )
        x, y = box[0] + across * box[2], box[1] + 0.5 * box[3]
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def color(self, x, y):
        """Of what is seen at a place, as three numbers up to 255."""
        clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
        shot = base64.b64decode(self.call("Page.captureScreenshot", clip=clip)["data"])
        chunks, at = b"", 8  # of a PNG, each with its length, its kind and its checksum
        while at < len(shot):
            size = int.from_bytes(shot[at : at + 4])
            if shot[at + 4 : at + 8] == b"IDAT":
                chunks += shot[at + 8 : at + 8 + size]
            at += 12 + size
        return tuple(zlib.decompress(chunks)[1:4])  # no filter changes the first pixel

    def screenshot(self, path, whole=True):
        """Write what it looks like."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def call(self, method, **parameters):
        """One command of the DevTools protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        return self._until(lambda got: got.get("id") == message["id"])["result"]

    def _until(self, wanted):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            while b"\0" not in self._buffer:
                if not select.select([self._receive], [], [], end - time.monotonic())[0]:
                    raise TimeoutError("Chromium does not answer")
                got = os.read(self._receive, 1 << 20)
                if not got:
                    raise ConnectionError("Chromium has ended")
                self._buffer += got
            line, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(line)
            assert "error" not in message, message
            self._note(message)
            if ("method" in message or "id" in message) and wanted({"method": "", **message}):
                return message
        raise TimeoutError("Chromium does not answer")

    def _note(self, message):
        method, got = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(got["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and got["type"] in ("error", "warning"):
            self.problems.append(got["args"])
        elif method == "Log.entryAdded" and got["entry"]["level"] in ("error", "warning"):
            self.problems.append(got["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(got["request"]["url"])


@contextlib.contextmanager
def chromium():
    """A page of a browser that is ended afterwards."""
    to_read, send = os.pipe()
    receive, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(to_read), str(to_write)]
            + [COMMAND, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            os.close(to_read)
            os.close(to_write)
            page = Page(send, receive)
            yield page
            with contextlib.suppress(Exception):
                page._session = None
                page.call("Browser.close")
        finally:
            os.close(send)
            os.close(receive)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def screenshots(report, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as page:
        for width, name in ((1200, "wide"), (390, "narrow")):
            for dark in (False, True):
                page.open(report, dark, width, 900)
                page.screenshot(folder / f"{name}-{'dark' if dark else 'light'}.png")
                print(page.problems, page.requests)


if __name__ == "__main__":
    screenshots(*sys.argv[1:])
