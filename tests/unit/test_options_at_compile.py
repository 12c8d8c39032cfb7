"""What of the options only shows when a model is compiled, and where its error is found."""

import pytest
import torch
from torch import nn

from memo_compile.errors import ConfigError, Infeasible, MemoError

pytestmark = pytest.mark.usefixtures("fresh_report")


def refused(**options: object) -> MemoError:
    """What memo raises, out of what the user sees."""
    torch._dynamo.reset()
    model = torch.compile(
        nn.Linear(64, 64), backend="memo", options={"lowering": "aten", **options}
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        model(torch.ones(512, 64))
    error = raised.value.inner_exception
    assert isinstance(error, MemoError)
    return error


def test_a_host_folder_that_is_not_there_is_named():
    error = refused(host_store="file:/nowhere/at/all")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "host_store: expected a folder that can be written, got '/nowhere/at/all'"
    )


def test_settings_that_inductor_lacks_are_refused():
    error = refused(inductor_options={"max_autotun": True})
    assert isinstance(error, ConfigError)
    assert "unknown setting 'max_autotun'; did you mean 'max_autotune'?" in str(error)


def test_a_budget_below_the_floor_says_the_floor():
    error = refused(memory_budget="64KiB")
    assert isinstance(error, Infeasible)
    assert error.floor_bytes is not None
    assert error.floor_bytes > 64 * 1024
