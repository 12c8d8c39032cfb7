"""docs/plan-json.md names every field and every word of the files of a dump."""

import dataclasses
import re
from pathlib import Path

import pytest

from memo_compile.step import movable, plans, problem

TEXT = (Path(__file__).parents[2] / "docs" / "plan-json.md").read_text()
NAMED = set(re.findall(r"`(\w+)`", TEXT))

CLASSES = (
    *(plans.Plan, plans.Decision, plans.Timeline, plans.Span, plans.FrontierPoint),
    *(plans.CheckVerdict, problem.FixedBytes, problem.LayerClassInfo, problem.Problem),
    *(problem.RegionProfile, problem.RegionBuffer, problem.OutsideBuffer, problem.RegionOutput),
    *(problem.StepCall, problem.Copy, problem.Into, problem.TensorInfo, movable.StepCosts),
)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_documented(kind):
    assert {field.name for field in dataclasses.fields(kind)} <= NAMED


@pytest.mark.parametrize("values", [problem.CallKind, problem.Storage, problem.Phase])
def test_every_word_is_documented(values):
    assert {value.value for value in values} <= NAMED


def test_the_version_is_the_documented_one():
    assert f"now {plans.SCHEMA_VERSION};" in TEXT
