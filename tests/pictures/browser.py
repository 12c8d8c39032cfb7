"""Pages as a headless Chromium lays them out: a picture, and where every piece of text lies.

The browser is told what to do through a pipe (its DevTools protocol), since its window cannot be as
narrow as a phone: only the metrics that a page sees can.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)

PATIENCE_S = 120.0
"""Far more than any answer takes on a machine that has other work."""

HEIGHT = 1000

ON_THREE_AND_FOUR = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The descriptors that ``--remote-debugging-pipe`` reads from and writes to."""

PROBE = """
(() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, [hidden]")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let clip = null;
    for (let one = parent; one && one !== document.body; one = one.parentElement) {
      if (getComputedStyle(one).overflow === "visible") continue;
      clip = one.getBoundingClientRect();
      break;
    }
    for (const rect of range.getClientRects()) {
      if (clip && (rect.right > clip.right + 1 || rect.bottom > clip.bottom + 1)) {
        if (parent.closest(".scroll")) continue;
        boxes.push({ text: node.data.trim(), cut: true });
        continue;
      }
      boxes.push({ text: node.data.trim(), left: rect.left, top: rect.top + scrollY,
        right: rect.right, bottom: rect.bottom + scrollY });
    }
  }
  const page = document.documentElement;
  return { width: innerWidth, page: page.scrollWidth, height: page.scrollHeight, boxes,
    dark: matchMedia("(prefers-color-scheme: dark)").matches };
})()
"""


def find_browser() -> str | None:
    """MEMO_CHROMIUM, or the first of NAMES that is installed."""
    named = os.environ.get("MEMO_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBox:
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "TextBox") -> bool:
        """By more than a pixel, which fonts' line boxes may share."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1.0 and down > 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    width: int
    page_width: int
    height: int
    dark: bool
    boxes: tuple[TextBox, ...]
    cut: tuple[str, ...]
    """Texts of which a part is hidden."""

    def overlapping(self) -> list[tuple[str, str]]:
        found = []
        ordered = sorted(self.boxes, key=lambda box: box.top)
        for index, box in enumerate(ordered):
            for other in ordered[index + 1 :]:
                if other.top > box.bottom:
                    break
                if box.overlaps(other):
                    found.append((box.text, other.text))
        return found


class Browser:
    """A running Chromium; :func:`started` makes one and ends it."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._unread = b""
        self._numbers = itertools.count(1)

    @contextmanager
    def page(self, html: str, folder: Path, *, width: int, dark: bool) -> Iterator["Page"]:
        """The page in a tab of its own, ``width`` pixels wide, loaded."""
        file = folder / f"page-{width}-{dark}.html"
        file.write_text(html, encoding="utf-8")
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, attached["sessionId"], width)
        page.ask("Page.enable")
        page.resize(HEIGHT)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.ask("Page.navigate", {"url": file.as_uri()})
        while self._read().get("method") != "Page.loadEventFired":
            continue
        try:
            yield page
        finally:
            self.ask("Target.closeTarget", {"targetId": target})

    def ask(self, method: str, params: object = None, session: str | None = None) -> Any:
        """The result of a command; events that come before it are dropped."""
        number = next(self._numbers)
        command: dict[str, object] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            continue
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self) -> Any:
        """The next message."""
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], end - time.monotonic())
            assert ready, f"the browser said nothing for {PATIENCE_S:.0f} s"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, width: int) -> None:
        self._browser = browser
        self._session = session
        self._width = width

    def ask(self, method: str, params: object = None) -> Any:
        return self._browser.ask(method, params, self._session)

    def resize(self, height: int) -> None:
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", size)

    def layout(self) -> Layout:
        asked = self.ask("Runtime.evaluate", {"expression": PROBE, "returnByValue": True})
        assert "exceptionDetails" not in asked, asked["exceptionDetails"]
        found = asked["result"]["value"]
        return Layout(
            width=found["width"],
            page_width=found["page"],
            height=found["height"],
            dark=found["dark"],
            boxes=tuple(TextBox(**box) for box in found["boxes"] if "cut" not in box),
            cut=tuple(box["text"] for box in found["boxes"] if "cut" in box),
        )

    def screenshot(self, picture: Path, *, height: int) -> None:
        self.resize(height)
        shot = self.ask("Page.captureScreenshot", {"format": "png"})
        picture.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """A browser that keeps its profile in ``profile``, until the end of the block."""
    program = find_browser()
    assert program is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    start = [sys.executable, "-c", ON_THREE_AND_FOUR, str(theirs_in), str(theirs_out)]
    process = subprocess.Popen(
        [*start, program, *options],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    browser = Browser(ours_out, ours_in)
    try:
        yield browser
        browser.ask("Browser.close")
    finally:
        os.close(ours_out)
        os.close(ours_in)
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
