"""Reading the files of a dump folder, with one line for what is wrong with them."""

from pathlib import Path

from memo_compile.step.serialise import Data, from_json
from memo_compile.text_files import read_text


def read_data(path: Path, kind: type[Data]) -> Data:
    """The ``kind`` in ``path``.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    return from_json(read_text(path), kind, where=str(path))
