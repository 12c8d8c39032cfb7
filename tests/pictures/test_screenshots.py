"""The report in a browser: at phone and desktop width, light and dark, nothing overlaps.

The pictures are left in the folder that MEMO_SCREENSHOTS names, to be looked at.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from memo_compile.planners.place_step import place_step
from memo_compile.reporting.html import render_html
from tests.pictures.browser import find_browser, started
from tests.steps.pictures import layered
from tests.steps.small import two_layers

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium found; install chromium-headless-shell or set MEMO_CHROMIUM",
)

WIDTHS = (1400, 420)


def _bare():
    """A plan without costs, budget, layers or decisions: every empty state."""
    problem = two_layers()
    return problem, place_step(problem, solver="greedy")


def _crowded():
    """Long names, many layers, many points of the frontier, over its budget."""
    problem, plan = layered(80)
    long_name = "a_rather_long_name_of_a_plan_" * 3
    points = [
        dataclasses.replace(
            plan.frontier[0],
            policy=f"auto-with-a-long-name-{i}",
            step_s=0.9 + i / 90,
            peak_bytes=plan.peak_bytes - i * 10**8,
        )
        for i in range(40)
    ]
    return problem, dataclasses.replace(
        plan,
        name=long_name,
        frontier=tuple(points),
        decisions=plan.decisions * 10,
        budget_bytes=plan.peak_bytes // 2,
    )


def _at_the_edge():
    """A frontier whose last tick, 140 GiB, lies at the right end of its axis."""
    problem, plan = layered()
    points = (
        dataclasses.replace(plan.frontier[0], step_s=3.0 - i / 9, peak_bytes=(65 + 5 * i) * 2**30)
        for i in range(14)
    )
    return problem, dataclasses.replace(plan, frontier=tuple(points), budget_bytes=99 * 2**30)


STEPS = {
    "bare": _bare,
    "layers-12": layered,
    "layers-80": _crowded,
    "last-tick-at-the-edge": _at_the_edge,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with started(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STEPS)
def test_nothing_overlaps_or_is_cut(browser, tmp_path, name, width, dark):
    folder = Path(os.environ.get("MEMO_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"report-{name}-{width}-{'dark' if dark else 'light'}.png"
    html = render_html(*STEPS[name]())
    with browser.page(html, tmp_path, width=width, dark=dark) as page:
        found = page.layout()
        page.screenshot(picture, height=found.height)
    assert (found.width, found.dark) == (width, dark)
    assert found.page_width <= width, "the page scrolls sideways"
    assert len(found.boxes) > 30
    assert found.cut == ()
    assert found.overlapping() == []
    outside = [box.text for box in found.boxes if box.left < 0 or box.right > width]
    assert outside == []
    assert picture.stat().st_size > 20_000


def test_overlapping_text_is_found(browser, tmp_path):
    broken = render_html(*_bare()).replace(
        "</main>", "<p>one</p><p style='margin-top:-24px'>over it</p></main>"
    )
    with browser.page(broken, tmp_path, width=420, dark=False) as page:
        assert page.layout().overlapping() != []


def test_pointing_at_a_block_names_it(browser, tmp_path):
    script = """<script>addEventListener("load", () => {
      const plot = document.querySelector(".map"), box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", { bubbles: true,
        clientX: box.left + box.width * 0.4, clientY: box.bottom - 30 }));
      const tip = document.getElementById("tip");
      const said = document.createElement("p");
      said.textContent = tip.hidden ? "NOTHING" : "TIP " + tip.innerText.split("\\n").join("; ");
      document.querySelector("main").append(said);
    });</script>"""
    html = render_html(*layered()).replace("</body>", f"{script}</body>")
    with browser.page(html, tmp_path, width=1400, dark=False) as page:
        found = page.layout()
    said = next(box.text for box in found.boxes if box.text.startswith(("TIP", "NOTHING")))
    assert "saved for the backward" in said
    assert "layer" in said
    assert "MiB at" in said


def test_the_table_of_decisions_sorts_and_filters(browser, tmp_path):
    script = """<script>addEventListener("load", () => {
      const table = document.getElementById("table"), said = document.createElement("p");
      const sizes = () => [...table.tBodies[0].rows].filter((row) => !row.hidden)
        .map((row) => Number(row.cells[2].dataset.sort));
      const before = sizes();
      table.tHead.rows[0].cells[2].firstElementChild.click();
      const sorted = sizes();
      const filter = document.getElementById("filter");
      filter.value = "recompute";
      filter.dispatchEvent(new Event("input"));
      said.textContent = "SAID " + JSON.stringify([before, sorted, sizes()])
        + document.getElementById("shown").textContent;
      document.querySelector("main").append(said);
    });</script>"""
    html = render_html(*layered()).replace("</body>", f"{script}</body>")
    with browser.page(html, tmp_path, width=1400, dark=False) as page:
        found = page.layout()
    said = next(box.text for box in found.boxes if box.text.startswith("SAID "))
    (before, in_order, filtered), end = json.JSONDecoder().raw_decode(said, 5)
    assert before != in_order == sorted(before)
    assert 0 < len(filtered) < len(before)
    assert said[end:] == f"{len(filtered)} of {len(before)} rows"
