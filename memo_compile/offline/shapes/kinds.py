"""What MODEL of ``memo plan`` is: a named shape, a Hugging Face config.json, or a user's function.

Nothing here loads torch, so that a command line that cannot be answered is refused at once.
"""

import re
from pathlib import Path
from typing import Any

from memo_compile.costs.models import ModelShape, find_model
from memo_compile.errors import InputError, require_at_least
from memo_compile.offline.shapes.degrees import Degrees
from memo_compile.text_files import read_json

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""``Qwen/Qwen3-0.6B``: a model's name on the Hugging Face hub."""


def is_function(model: str) -> bool:
    """True for ``package.module:function``."""
    return ":" in model and not Path(model).exists()


def is_shape(model: str) -> bool:
    """True for what may be the name of a shape; false for a file or a function of the user's."""
    return ":" not in model and not model.endswith(".json") and not Path(model).exists()


def shape_of(model: str) -> ModelShape | None:
    """Returns the shape called ``model``; None where it is a file or a function.

    Raises InputError: no shape has that name.
    """
    if not is_shape(model):
        return None
    if _HUB_NAME.fullmatch(model):
        folder = model.rpartition("/")[2]
        raise InputError(
            f"model: {model!r} is no file here. memo plans from a config.json; of a model on the "
            f"Hugging Face hub: hf download {model} config.json --local-dir {folder}, then: "
            f"memo plan {folder}/config.json"
        )
    return find_model(model)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config.json. Raises InputError: it is none."""
    if path.is_dir():
        raise InputError(f"{path}: a folder; give the file in it: {path / 'config.json'}")
    body = read_json(path)
    if not isinstance(body, dict) or not isinstance(body.get("model_type"), str):
        raise InputError(f"{path}: field 'model_type' is missing; expected a config.json")
    return body


def require_plannable(model: str, degrees: Degrees, seq: int | None, lora: int | None) -> None:
    """Raises InputError: ``model`` is unknown, or cannot be cut or adapted as it is asked."""
    shape = shape_of(model)
    if lora is not None:
        require_at_least(1, {"lora": lora})
        if shape is None or degrees.tp > 1:
            raise InputError(
                "lora: adapters are added to named shapes only, without --tp; give a function of "
                "your own otherwise"
            )
    if shape is not None:
        if seq is not None:
            degrees.require_divides(shape, seq)
        return
    if not is_function(model):
        read_config(Path(model))
    for name in ("tp", "cp", "pp"):
        if getattr(degrees, name) > 1:
            raise InputError(
                f"{name}: only named shapes are cut over devices; give {model} as it is on one"
            )
