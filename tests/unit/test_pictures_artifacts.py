"""Artifacts for tlparse: in torch's structured trace when one is written, else free."""

import json
import logging

import torch._logging._internal as torch_logging

from memo_compile.backends.entry import trace_plan


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append((record.metadata, record.payload))


def test_a_plan_is_an_artifact_with_its_name(monkeypatch):
    handler = Records()
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [handler])
    monkeypatch.setattr(torch_logging.trace_log, "level", logging.DEBUG)
    torch_logging.trace_log.manager._clear_cache()
    trace_plan("graph0", lambda: '{"a": 1}')
    torch_logging.trace_log.manager._clear_cache()
    found = {
        record["artifact"]["name"]: (record["artifact"]["encoding"], text)
        for record, text in handler.records
        if "artifact" in record
    }
    assert found["memo_graph0_plan"] == ("json", '{"a": 1}')
    assert json.loads(found["memo_graph0_plan"][1]) == {"a": 1}


def test_without_a_trace_no_text_is_made(monkeypatch):
    monkeypatch.setattr(torch_logging.trace_log, "handlers", [])

    def make() -> str:
        raise AssertionError("nobody reads it")

    trace_plan("graph0", make)
