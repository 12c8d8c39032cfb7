"""Which vector instructions work here, remembered from one process to the next.

Torch finds out by programs that it compiles, loads and drops again, a second in every process that
lowers for the CPU. Where all that the processor has worked before, with this torch and this
compiler, that is not asked again.
"""

import functools

from memo_compile.file_store import FileStore, code_digest
from memo_compile.torch_private import compile_caches


@functools.cache
def probe_once(store: FileStore) -> None:
    """Find out, by what ``store`` remembers where it can; once in a process.

    A set that did not work is asked for in every process, as torch does it.
    """
    depends = compile_caches.vector_probe()
    if depends is None:
        return
    key = {"kind": "vector-probe", "code": code_digest(), "depends": depends}
    known = any(body is True for body in store.read(key))
    if compile_caches.probe_vectors(known) and not known:
        store.write(key, True)
