"""What of the options only shows when a model is compiled, and where its error is found."""

import traceback

import pytest
import torch
from memo_runtime.arena import ArenaError
from memo_runtime.host_store import HostStoreError
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

import memo_compile
from memo_compile.backends import entry
from memo_compile.driver import knowledge
from memo_compile.errors import ConfigError, Infeasible, MemoError, RuntimeMisuse, TooSlow
from memo_compile.torch_private import dynamo

pytestmark = pytest.mark.usefixtures("fresh_report")


def refused(model: nn.Module | None = None, **options: object) -> MemoError:
    """What memo raises, out of what the user sees."""
    torch._dynamo.reset()
    model = torch.compile(
        model or nn.Linear(64, 64), backend="memo", options={"lowering": "aten", **options}
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        model(torch.ones(512, 64))
    error = raised.value.inner_exception
    assert isinstance(error, MemoError)
    assert isinstance(raised.value, type(error))
    return error


def test_compiled_autograd_is_refused_with_the_setting_to_change():
    """Row 42: it traces the backward itself, and ended in an IndexError."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        error = refused()
    assert isinstance(error, ConfigError)
    assert "set torch._dynamo.config.compiled_autograd = False" in str(error)


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}], ids=["plain", "budget"])
def test_a_compiler_that_is_missing_is_named(options, monkeypatch):
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing_compiler)
    error = refused(lowering="inductor", cache=False, **options)
    assert isinstance(error, ConfigError)
    assert "No working C++ compiler" in str(error)
    assert "Install g++ or name a compiler in the environment variable CXX" in str(error)


def missing_compiler() -> str:
    raise InvalidCxxCompiler


def test_compiled_autograd_that_is_switched_on_later_is_refused():
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(8, 8), backend="memo", options={"lowering": "aten"})
    model(torch.ones(2, 8)).sum().backward()
    with (
        torch._dynamo.compiled_autograd._enable(lambda gm: gm),
        pytest.raises(RuntimeMisuse, match="compiled_autograd = False"),
    ):
        model(torch.ones(2, 8))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}], ids=["plain", "budget"])
def test_a_backward_alone_under_compiled_autograd_is_refused_and_runs_without(options):
    """Its forward has run by a plan: nobody else can run it. In pieces as in a whole graph."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x).tanh()
            torch._dynamo.graph_break()
            return self.second(x).tanh()

    torch._dynamo.reset()
    model, x = Broken(), torch.ones(2, 8)
    compiled = torch.compile(model, backend="memo", options={"lowering": "aten", **options})
    for _ in range(3):
        loss = compiled(x).sum()
        with (
            torch._dynamo.compiled_autograd._enable(lambda gm: gm),
            pytest.raises(RuntimeMisuse, match="compiled_autograd = False"),
        ):
            loss.backward()
        model.zero_grad()
        compiled(x).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for own, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad)


def test_a_host_folder_is_named_where_it_is_needed():
    error = refused(host_store="file:/nowhere/at/all", policy="full-offload")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "host_store: expected a folder that can be written, got '/nowhere/at/all'; policy "
        "'full-offload' moves activations to it"
    )
    missing = {"host_store": "file:/nowhere/at/all", "lowering": "aten"}
    two = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    floor = refused(memory_budget=1, model=two).floor_bytes
    error = refused(**missing, memory_budget=floor, model=two)
    assert str(error).endswith(
        "; the step does not fit while it keeps everything, and needs it to move activations"
    )
    torch._dynamo.reset()
    recomputing = torch.compile(two, backend="memo", options=missing | {"policy": "full-recompute"})
    recomputing(torch.ones(512, 64)).sum().backward()
    assert memo_compile.report().active


def lines_of_the_first_call(**options: object) -> list[str]:
    """What Python prints when the first call of a program is refused."""
    torch._dynamo.reset()
    model = torch.compile(
        nn.Linear(64, 64), backend="memo", options={"lowering": "aten", **options}
    )
    with pytest.raises(MemoError) as raised:
        model(torch.ones(512, 64))
    return "".join(traceback.format_exception(raised.value)).splitlines()


def test_what_the_first_call_refuses_ends_with_its_sentence_and_without_memos_frames():
    lines = lines_of_the_first_call(memory_budget="1KB")
    assert lines[-1].startswith("memo_compile.errors.Infeasible: budget 1000 B < floor ")
    assert len(lines) <= 25
    assert not [line for line in lines if "/memo_compile/" in line]
    lines = lines_of_the_first_call(budget="1KB")
    assert lines[-1].endswith("unknown option 'budget'; did you mean 'memory_budget'?")
    with torch._dynamo.config.patch(verbose=True):
        lines = lines_of_the_first_call(memory_budget="1KB")
    assert [line for line in lines if "/memo_compile/driver/" in line]


def test_the_report_names_variables_and_options_that_change_nothing(monkeypatch):
    monkeypatch.setenv("MEMO_MEMORY_BUGDET", "1GiB")
    torch._dynamo.reset()
    options = {"lowering": "aten", "alpha": "0.5", "inductor_options": {"max_autotune": True}}
    torch.compile(nn.Linear(8, 8), backend="memo", options=options)(torch.ones(2, 8))
    notes = memo_compile.report().notes
    assert "MEMO_MEMORY_BUGDET sets no option; did you mean MEMO_MEMORY_BUDGET?" in notes
    assert any(note.startswith("alpha=0.5 changes nothing under policy 'auto'") for note in notes)
    assert any(note.startswith("inductor_options change nothing") for note in notes)


def test_a_host_folder_costs_no_plan_where_nothing_is_offloaded(monkeypatch):
    def probed(*_: object) -> None:
        raise AssertionError("nobody needs to know how fast copies are")

    monkeypatch.setattr(knowledge, "copy_bandwidth", probed)
    torch._dynamo.reset()
    options = {"host_store": "file:/nowhere", "memory_budget": "1GiB", "lowering": "aten"}
    model = torch.compile(nn.Linear(64, 64), backend="memo", options=options)
    model(torch.ones(512, 64)).sum().backward()
    report = memo_compile.report()
    assert report.active
    assert [note.startswith("host_store: ") for note in report.notes] == [True]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"memory_budget": "64KiB"}, memo_compile.errors.Infeasible),
        ({"memory_bugdet": 1}, memo_compile.errors.ConfigError),
    ],
)
def test_an_error_is_caught_by_its_public_type_at_the_first_call(options, kind):
    torch._dynamo.reset()
    model = torch.compile(
        nn.Linear(64, 64), backend="memo", options={"lowering": "aten", **options}
    )
    try:
        model(torch.ones(512, 64))
    except kind as error:
        caught = error
    assert isinstance(caught, torch._dynamo.exc.BackendCompilerFailed)
    assert type(caught.inner_exception) is kind
    assert str(caught.inner_exception) in str(caught)
    if kind is Infeasible:
        assert caught.floor_bytes == caught.inner_exception.floor_bytes > 64 * 1024


def test_every_error_of_memo_may_be_one_of_dynamos():
    for kind in (ArenaError, HostStoreError, *MemoError.__subclasses__()):
        error = kind("no", step_s=1.0) if kind is TooSlow else kind("no")
        both = dynamo.as_backend_failure(error, entry.memo, None)
        assert isinstance(both, kind)
        assert isinstance(both, torch._dynamo.exc.BackendCompilerFailed)
        assert both.inner_exception is error
        assert type(both).__name__ == kind.__name__
        assert "no" in str(both)


def test_settings_that_inductor_lacks_are_refused():
    error = refused(inductor_options={"max_autotun": True})
    assert isinstance(error, ConfigError)
    assert "unknown setting 'max_autotun'; did you mean 'max_autotune'?" in str(error)


def test_a_step_without_layers_fits_where_it_keeps_everything_and_says_so():
    """Its floor is the peak that it has under a budget that asks for nothing."""
    error = refused(memory_budget="64KiB")
    assert "; everything is kept, since no repeating layers were found); raise" in str(error)
    torch._dynamo.reset()
    options = {"memory_budget": error.floor_bytes, "lowering": "aten"}
    model = torch.compile(nn.Linear(64, 64), backend="memo", options=options)
    model(torch.ones(512, 64)).sum().backward()
    (plan,) = memo_compile.report().plans
    assert plan.peak_bytes == error.floor_bytes
