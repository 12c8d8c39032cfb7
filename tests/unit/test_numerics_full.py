"""Counting pytest's report of the full numerics."""

from benchmarks.numerics_full import counted, read

REPORT = """<testsuites><testsuite>
<testcase classname="t" name="test_a[llama-auto-floor]" time="1.5"/>
<testcase classname="t" name="test_a[llama-memo-floor]" time="2.0"><failure message="m">x</failure></testcase>
<testcase classname="t" name="test_a[t5-memo-floor]" time="0.4"><skipped/></testcase>
<testcase classname="t" name="test_b" time="3.0"><error message="m"/></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_cases_are_counted_by_test_and_model():
    cases = list(read(REPORT))
    assert [case.outcome for case in cases] == ["passed", "failure", "skipped", "error"]
    assert cases[1].name == "llama-memo-floor"
    assert counted(cases) == [
        ("test_a", "llama", 1, 1, 0, 4),
        ("test_a", "t5", 0, 0, 1, 0),
        ("test_b", "", 0, 1, 0, 3),
    ]
