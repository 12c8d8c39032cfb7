"""Artifacts for tlparse: in torch's structured trace when one is written, else free."""

import functools
import json
import logging

import torch._logging._internal as torch_logging

from memo_compile.backends.artifacts import emit_artifacts


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append((record.metadata, record.payload))


def test_texts_are_artifacts_with_the_plans_name(monkeypatch):
    handler = Records()
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [handler])
    monkeypatch.setattr(torch_logging.trace_log, "level", logging.DEBUG)
    torch_logging.trace_log.manager._clear_cache()
    texts = {"plan.json": '{"a": 1}', "report.html": "<p>", "note": "x"}
    emit_artifacts("graph0", {name: functools.partial(str, text) for name, text in texts.items()})
    torch_logging.trace_log.manager._clear_cache()
    found = {
        record["artifact"]["name"]: (record["artifact"]["encoding"], text)
        for record, text in handler.records
        if "artifact" in record
    }
    assert found["memo_graph0_plan"] == ("json", '{"a": 1}')
    assert json.loads(found["memo_graph0_plan"][1]) == {"a": 1}
    assert found["memo_graph0_report"] == ("string", "<p>")
    assert found["memo_graph0_note"][1] == "x"


def test_without_a_trace_no_text_is_made(monkeypatch):
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [])

    def make() -> str:
        raise AssertionError("nobody reads it")

    emit_artifacts("graph0", {"plan.json": make})
