"""Pages as a headless Chromium lays them out: a picture, and where every piece of text lies."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

NAMES = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)

PROBE = """
<script>
addEventListener("load", () => {
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
  const found = document.createElement("pre");
  found.id = "probe";
  const page = document.documentElement;
  found.textContent = JSON.stringify(
    { width: innerWidth, page: page.scrollWidth, height: page.scrollHeight, boxes });
  found.style.display = "none";
  document.body.append(found);
});
</script>
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
    boxes: tuple[TextBox, ...]
    cut: tuple[str, ...]
    """Texts of which a part is hidden."""

    def overlapping(self) -> list[tuple[str, str]]:
        found = []
        ordered = sorted(self.boxes, key=lambda one: one.top)
        for index, one in enumerate(ordered):
            for other in ordered[index + 1 :]:
                if other.top > one.bottom:
                    break
                if one.overlaps(other):
                    found.append((one.text, other.text))
        return found


def _arguments(page: Path, width: int, height: int, dark: bool) -> list[str]:
    browser = find_browser()
    assert browser is not None
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    return [browser, *common, f"--window-size={width},{height}", *scheme, page.as_uri()]


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def layout(html: str, folder: Path, *, width: int, dark: bool) -> Layout:
    page = folder / f"probe-{width}-{dark}.html"
    page.write_text(html.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom = _run([*_arguments(page, width, 1000, dark), "--dump-dom"])
    text = re.search(r'<pre id="probe"[^>]*>(.*?)</pre>', dom, re.DOTALL)
    assert text is not None, "the page's script did not run to its end"
    found = json.loads(unescape(text.group(1)))
    whole = [one for one in found["boxes"] if "cut" not in one]
    return Layout(
        width=found["width"],
        page_width=found["page"],
        height=found["height"],
        boxes=tuple(TextBox(**one) for one in whole),
        cut=tuple(one["text"] for one in found["boxes"] if "cut" in one),
    )


def screenshot(html: str, picture: Path, *, width: int, height: int, dark: bool) -> None:
    page = picture.with_suffix(".html")
    page.write_text(html, encoding="utf-8")
    _run([*_arguments(page, width, height, dark), f"--screenshot={picture}"])
