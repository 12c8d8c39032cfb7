"""MODEL of ``memo plan``: a named shape, a Hugging Face config.json, or a user's function."""

import importlib
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memo_compile.costs.models import ModelShape
from memo_compile.errors import InputError, nearest
from memo_compile.offline.longer_model import LongerModel
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.offline.shapes.kinds import is_function, read_config, shape_of
from memo_compile.offline.shapes.transformer import default_dtype, first_stage
from memo_compile.torch_private.fx_graphs import fake_mode
from memo_compile.torch_private.model_of_fakes import model_of_fakes

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields of a config.json without which transformers would silently take a default shape."""


MAX_LINE = 300
"""Characters of another library's message that are shown: some list hundreds of names."""

TRACED_LAYERS = 5
"""Layers that are traced of a model whose layers are equal: the plan repeats one in the middle, and
torch's min-cut treats layers alike only with some hundred operators behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A step's model and inputs as fakes: one device's share."""

    name: str
    model: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shorter: "Loaded | None" = None
    """The same step with fewer layers, which is traced in seconds."""
    longer_model: LongerModel | None = None
    """For a shorter step: the model that it stands for."""
    num_tokens: int | None = None
    """Tokens of the step on one data-parallel replica; None where that is unknown."""
    notes: tuple[str, ...] = ()


def load(
    model: str, *, seq: int | None, batch: int, dtype: torch.dtype, degrees: Degrees, lora: int = 0
) -> Loaded:
    """Builds ``model`` on fake tensors: nothing is allocated. ``lora``: the rank of its adapters.

    Raises InputError: it is unknown, lacks a field, or cannot be cut as ``degrees`` say.
    """
    if is_function(model):
        return _of_function(model, seq=seq, batch=batch, dtype=dtype)
    assert seq is not None, "of a shape or a file the length is asked for"
    shape = shape_of(model)
    if shape is None:
        return _of_config(Path(model), seq=seq, batch=batch, dtype=dtype)
    shape = replace(shape, adapter_rank=lora)
    with fake_mode():
        built, inputs = first_stage(shape, degrees, seq=seq, batch=batch, dtype=dtype)
        shorter = _shorter(built, shape, degrees, seq=seq, batch=batch, dtype=dtype)
    note = (
        f"planned is the first of {degrees.pp} pipeline stages, which has {degrees.pp} "
        "micro-batches in flight (1F1B); bubbles are not in the step time"
    )
    return Loaded(
        name=shape.name,
        model=built,
        args=inputs,
        shorter=shorter,
        num_tokens=seq * batch,
        notes=(note,) if degrees.pp > 1 else (),
    )


def _shorter(
    model: torch.nn.Module, shape: ModelShape, degrees: Degrees, **sizes: Any
) -> Loaded | None:
    """Returns the stage with TRACED_LAYERS layers; None where ``model`` has no more than those."""
    num_layers = shape.num_layers // degrees.pp
    if num_layers <= TRACED_LAYERS:
        return None
    short_shape = replace(shape, num_layers=TRACED_LAYERS * degrees.pp)
    short_model, inputs = first_stage(short_shape, degrees, **sizes)
    traced_names = {name for name, _ in _tensors(short_model)}
    untraced = tuple(tensor for name, tensor in _tensors(model) if name not in traced_names)
    longer_model = LongerModel(num_layers=num_layers, untraced=untraced)
    return Loaded(name=short_shape.name, model=short_model, args=inputs, longer_model=longer_model)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _of_config(path: Path, *, seq: int, batch: int, dtype: torch.dtype) -> Loaded:
    """Builds the causal language model of a config.json with transformers. Raises InputError."""
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError(f"{path}: needs transformers; pip install transformers") from error
    body = read_config(path)
    kind = body.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{path}: transformers {transformers.__version__} has no model of model_type {kind!r}"
            f"{nearest(kind, CONFIG_MAPPING, least=0.75)}; newer models need a newer transformers"
        )
    try:
        config = AutoConfig.for_model(kind, **body)
    except Exception as error:  # transformers raises what it likes on a bad configuration
        raise InputError(f"{path}: transformers refuses it: {_first_line(error)}") from error
    for name in _NEEDED:
        if name not in body and config.attribute_map.get(name) not in body:
            raise InputError(f"{path}: field {name!r} is missing")
    config.use_cache = False
    try:
        with fake_mode(), default_dtype(dtype):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            ids, labels = (torch.ones(batch, seq, dtype=torch.long) for _ in range(2))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path}: transformers refuses it: {_first_line(error)}") from error
    return Loaded(
        name=f"{path.name} ({kind})",
        model=model,
        kwargs={"input_ids": ids, "labels": labels, "use_cache": False},
        num_tokens=seq * batch,
        notes=("the model returns its logits beside the loss; they are counted as an output",),
    )


def _of_function(text: str, *, seq: int | None, batch: int, dtype: torch.dtype) -> Loaded:
    """Calls ``package.module:function`` with those of seq, batch and dtype that it takes."""
    module_name, _, function_name = text.partition(":")
    if (path := Path(module_name)).suffix == ".py":
        raise InputError(
            f"{text}: expected a module, not a file: {path.stem}:{function_name}, from its folder"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{text}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{text}: {module_name} has no function {function_name!r}")
    parameters = inspect.signature(function).parameters
    values = {"seq": seq, "batch": batch, "dtype": dtype}
    arguments = {name: value for name, value in values.items() if name in parameters}
    notes: tuple[str, ...] = ()
    if seq is None and "seq" in parameters:  # the function's default then
        default = parameters["seq"].default
        if default is inspect.Parameter.empty:
            raise InputError(f"{text}: takes seq; give --seq N")
        del arguments["seq"]
        seq = default if isinstance(default, int) else None
        notes = (f"without --seq the function's own is taken: {default}",)
    result = _called(function, arguments, text)
    if not isinstance(result, tuple) or len(result) != 2 or not callable(result[0]):
        raise InputError(f"{text}: expected (model, example inputs), got {type(result).__name__}")
    model, inputs = result
    num_tokens = seq * batch if seq is not None and "seq" in parameters else None
    if seq is not None and "seq" not in parameters:
        notes = ("the function takes no seq: --seq is unused",)
    loaded = Loaded(name=text, model=model, num_tokens=num_tokens, notes=notes)
    if isinstance(inputs, Mapping):
        return replace(loaded, kwargs=inputs)
    return replace(loaded, args=(inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs))


def _called(function: Callable[..., Any], arguments: Mapping[str, Any], text: str) -> Any:
    """Calls the user's function on fake tensors. Raises InputError: it does not run on them."""
    try:
        with model_of_fakes():
            return function(**arguments)
    except RuntimeError as error:  # of torch's fakes too
        # The message names the line of the function's own file in which it failed.
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f", line {lines[-1]}" if lines else ""
        raise InputError(
            f"{text}{where}: {type(error).__name__}: {_first_line(error)}. It is called on fake "
            "tensors of the CPU, which have no values to read"
        ) from error


def _first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most MAX_LINE characters of it."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return textwrap.shorten(line, MAX_LINE, placeholder=" ...")
