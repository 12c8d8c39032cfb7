"""The HTML report: whole, self-contained, small, legible."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from memo_compile.reporting import charts
from memo_compile.reporting.html import render_html
from memo_compile.reporting.view import view_step
from memo_compile.step.plans import CheckVerdict, Decision
from tests.steps.pictures import layered
from tests.steps.small import planned, two_layers

VOID = {"meta", "br", "link", "img", "input", "hr"}
MOST_BYTES = 2 * 1024 * 1024


class Outline(HTMLParser):
    """Checks that tags nest, and collects what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.paths, self.text = [], set(), [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self.links += [values[key] for key in ("src", "href") if key in values]
        if tag == "path":
            self.paths.append((values["class"], values["d"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def outline(html):
    found = Outline(html)
    assert found.open == []
    return found


def words(html):
    return " ".join(" ".join(outline(html).text).split())


def test_the_page_has_every_part_and_loads_nothing():
    html = render_html(*layered())
    page = outline(html)
    parts = {"parts", "memory", "arena", "timeline", "frontier", "decisions"}
    assert parts <= page.ids
    assert page.links == []
    assert "http" not in html
    assert "url(" not in html
    text = words(html)
    assert "12 layers (model.layers)" in text
    assert "1.72 GiB" in text
    assert "fits," in text
    assert "full-recompute" in text
    assert "12 ms of copy hide behind 31 ms of compute" in text


def test_arena_and_lanes_are_drawn_by_role():
    page = outline(render_html(*layered()))
    classes = {css.split(" ")[0] for css, _ in page.paths}
    assert {"saved", "offloaded", "reloaded", "recomputed", "scratch"} <= classes
    assert {"forward", "backward", "stall", "d2h", "h2d"} <= classes
    assert {"held", "live", "made", "fixed"} <= classes
    for _, d in page.paths:
        assert re.fullmatch(r"[MLHVhvz0-9. -]+", d)


def test_hovering_knows_name_size_reason_and_source():
    html = render_html(*layered())
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL).group(1))
    texts = data["arena"]["texts"]
    tips = [[texts[i] for i in row[4:]] for row in data["arena"]["rows"]]
    tip = next(tip for tip in tips if tip[:2] == ["attn.0", "layer 0 forward"])
    assert tip[3].startswith("24.00 MiB at ")
    assert tip[4] == "until copied to the host"
    assert tip[6] == "12 ms of copy hide behind 31 ms of compute"
    assert tip[7] == "train/model.py:76"
    assert set(data["lanes"]) == {"compute", "d2h", "h2d", "communication"}


def test_80_layers_stay_under_two_megabytes():
    html = render_html(*layered(80))
    assert len(html.encode()) < MOST_BYTES
    outline(html)


def test_the_head_says_what_was_planned_when_and_by_which_versions():
    about = {"model": "llama-7b", "shape": "1 x 4096 tokens", "options": "budget <60GiB>"}
    html = render_html(*layered(), about)
    text = words(html)
    for name, said in about.items():
        assert f"{name} {said}" in text
    assert re.search(
        r"versions memo [\d.]+, torch [\d.+a-z]+, Python [\d.]+ date 20\d\d-\d\d", text
    )
    assert "12 x model.layers: compiled once, as " in text


def test_the_frontier_says_in_percent_what_a_plan_costs_and_what_it_moves():
    problem, plan = layered()
    text = words(render_html(problem, plan))
    assert "Chosen: 4 layers to the host, 12 recomputed , +16.3 % (" in text
    assert "all kept save" in text  # the fastest one: nothing moves
    assert re.search(r"[\d.]+ [KMG]iB more buys 14.0 % of the step", text)
    fastest = dataclasses.replace(plan.frontier[1], step_s=plan.frontier[0].step_s / 2)
    plan = dataclasses.replace(plan, frontier=(plan.frontier[0], fastest))
    assert "more buys" not in words(render_html(problem, plan))


def test_the_axis_has_the_seconds_of_the_simulated_step():
    problem, plan = layered()
    view = view_step(problem, plan)
    times = charts.program_axis(problem, plan, view)["times"]
    assert len(times) >= 2
    assert times[0] == {"at": 0.0, "text": "0"}
    places = [tick["at"] for tick in times]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    bare = dataclasses.replace(plan, timeline=None)
    assert charts.program_axis(problem, bare, view)["times"] == []


def test_a_tensor_has_the_name_of_its_module():
    problem, plan = layered(2)
    name = plan.decisions[0].tensor.partition(" ")[0]
    tensors = dict(problem.tensors)
    tensors[name] = dataclasses.replace(tensors[name], role="mlp.up")
    rows = (dataclasses.replace(plan.decisions[0], role="mlp.up"), *plan.decisions[1:])
    problem = dataclasses.replace(problem, tensors=tensors)
    plan = dataclasses.replace(plan, decisions=rows)
    assert "mlp.up" in {box.name for box in view_step(problem, plan).boxes}
    assert '<b>mlp.up</b> <span class="shape">' in render_html(problem, plan)


def test_what_is_missing_is_said_and_not_drawn():
    problem = two_layers()
    html = render_html(problem, planned(problem))
    text = words(html)
    assert "No timeline: this step was planned without costs" in text
    assert "No frontier: no budget made memo weigh plans" in text
    assert "No decisions: no layer leaves a tensor" in text
    assert "no budget was set" in text
    assert 'data-chart="lanes"' not in html


def test_the_verdict_is_the_plans():
    problem, plan = layered(4)
    over = dataclasses.replace(plan, budget_bytes=plan.peak_bytes - 1024 * 1024)
    assert "does not fit: 1.00 MiB too much" in words(render_html(problem, over))
    wrong = dataclasses.replace(plan, check=CheckVerdict(problems=("two buffers share a byte",)))
    assert "the checker found faults" in words(render_html(problem, wrong))
    assert "two buffers share a byte" in words(render_html(problem, wrong))


def test_names_cannot_break_the_page():
    problem, plan = layered(4)
    evil = Decision(
        tensor="</script><b>x [1]",
        layer_class="<i>",
        bytes=1,
        decision="SAVE",
        token_fraction=0.5,
        reason='"quoted" & <b>bold',
        source="a<b.py:1",
    )
    plan = dataclasses.replace(plan, name="<script>alert(1)</script>", decisions=(evil,))
    html = render_html(problem, plan)
    assert "<script>alert" not in html
    assert "<b>bold" not in html
    assert "50 %" in words(html)


def colours(scheme):
    css = (resources.files("memo_compile.reporting") / "templates" / "report.css").read_text()
    light, _, dark = css.partition("@media (prefers-color-scheme: dark)")
    found = dict(re.findall(r"--(\w+): (#\w{6})", light))
    if scheme == "dark":
        found |= dict(re.findall(r"--(\w+): (#\w{6})", dark))
    return found


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_and_marks_stand_out(scheme):
    found = colours(scheme)
    for text in ("ink", "soft", "good", "bad", "budget"):
        for ground in ("paper", "panel"):
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    for mark in ("saved", "offloaded", "recomputed", "stall", "backward", "live"):
        assert contrast(found[mark], found["panel"]) >= 2.5, mark


def test_what_moves_goes_to_host_memory_whatever_its_kind():
    """A CPU's host store is no pinned memory."""
    page = render_html(*layered(4))
    assert "in host memory" in page
    assert "pinned" not in page
