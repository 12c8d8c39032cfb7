"""Remembers from one process to the next which vector instructions work here.

Torch finds out by compiling and loading small programs: a second in every process that lowers for
the CPU. Where all instructions of the processor have worked before, with this torch and compiler,
that is skipped.
"""

import functools

from memo_compile.file_store import FileStore, code_digest
from memo_compile.torch_private import compile_caches


@functools.cache
def probe_once(store: FileStore) -> None:
    """Probes the vector instructions, once in a process; skipped if ``store`` says that all work.

    A set that did not work is probed in every process, as torch does it.
    """
    depends = compile_caches.vector_probe()
    if depends is None:
        return
    key = {"kind": "vector-probe", "code": code_digest(), "depends": depends}
    all_work = any(body is True for body in store.read(key))
    if compile_caches.probe_vectors(all_work) and not all_work:
        store.write(key, True)
