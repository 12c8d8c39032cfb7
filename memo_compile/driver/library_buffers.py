"""Makes BLAS libraries allocate what they keep for good before a step under a budget (CPU).

MKL packs blocks of its operands into buffers that each thread keeps: 1 to 5 MiB, allocated in the
first product that needs them. A larger product gets a larger buffer, and the smaller ones stay:
6 MiB in the first step of a model whose layers come before its wide head. A buffer grows with each
dimension of the product, up to the size of a block. So running products of at most a block's size,
largest first, allocates in milliseconds all that the step would.

oneDNN keeps a kernel for each combination of operator, shapes, strides, dtypes and bias: 0.1 to
0.8 MiB each, for convolutions and for products in bfloat16 and float16. They depend on the whole
shape, and on what a lowering made of it. So regions with such operators run once as they are.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from memo_runtime.pages import trim_heap
from torch import fx

from memo_compile.analysis.structure import is_matmul, op_name
from memo_compile.analysis.views import is_tensor, shape_of

MAX_ROWS, MAX_INNER, MAX_COLUMNS = 512, 512, 8192
"""Largest product that is run. MKL 2024's buffers for float32 with AVX-512 stop growing at 512, 384
and 6,144. With two threads 1,024 rows would take 0.2 MiB more."""

MAX_BATCH_PER_THREAD = 2
"""Products of a batch that are run per thread: every thread multiplies in buffers of its own."""

_FACTORS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Operator that multiplies matrices -> position of its first factor; the second follows."""

_TYPES = frozenset(
    (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16, torch.float16)
)
"""Dtypes that libraries multiply; torch has kernels of its own for the rest."""

_MKL_TYPES = frozenset((torch.float32, torch.float64, torch.complex64, torch.complex128))
"""Dtypes whose products are MKL's, unless the user lets float32 be rounded in them."""

_OTHER_PRODUCTS = frozenset(("mv", "addmv", "dot", "vdot", "baddbmm"))
"""Operators that multiply, are not among ``is_matmul``'s, and have no "attention" in their name."""


class Product(NamedTuple):
    """(rows x inner) by (inner x columns), ``batch`` times."""

    rows: int
    inner: int
    columns: int
    batch: int
    dtype: torch.dtype

    def run(self) -> None:
        """Multiplies once, so that the library allocates what it keeps for this product."""
        left = torch.ones(self.batch, self.rows, self.inner, dtype=self.dtype, device="cpu")
        right = torch.ones(self.batch, self.inner, self.columns, dtype=self.dtype, device="cpu")
        if self.batch == 1:
            torch.mm(left[0], right[0])
        else:
            torch.bmm(left, right)

    def cropped(self, num_threads: int) -> "Product":
        """Returns the smallest product that needs the same buffers."""
        return self._replace(
            rows=min(self.rows, MAX_ROWS),
            inner=min(self.inner, MAX_INNER),
            columns=min(self.columns, MAX_COLUMNS),
            batch=min(self.batch, MAX_BATCH_PER_THREAD * num_threads),
        )


_ATTENTION = Product(rows=256, inner=512, columns=512, batch=2**10, dtype=torch.float32)
"""Stands for any attention on CPU: its kernels hand the library no larger blocks than these."""


def products_of(graphs: Iterable[fx.GraphModule]) -> frozenset[Product]:
    """Returns the distinct matrix products on CPU in ``graphs``."""
    return frozenset(product for gm in graphs for product in _products(gm))


def keeps_kernels(gm: fx.GraphModule) -> bool:
    """True where oneDNN keeps kernels for the very shapes of ``gm``."""
    return any(_keeps_kernels(node) for node in gm.graph.nodes if node.op == "call_function")


def _keeps_kernels(node: fx.Node) -> bool:
    """True for a convolution, an RNN, or a product that oneDNN and not MKL multiplies."""
    name = op_name(node)
    if "convolution" in name or "rnn" in name:
        return True
    if not (is_matmul(node) or "attention" in name or name in _OTHER_PRODUCTS):
        return False
    dtypes = {source.meta["val"].dtype for source in node.all_input_nodes if is_tensor(source)}
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    rounds = precision in ("tf32", "bf16")
    return not dtypes <= _MKL_TYPES or (rounds and torch.float32 in dtypes)


class LibraryBuffers(threading.local):
    """The products whose buffers this thread has, by its number of intra-op threads."""

    def __init__(self) -> None:
        self._ran: set[tuple[int, Product]] = set()

    def require(self, products: frozenset[Product]) -> None:
        """Runs those of ``products``, cropped, that this thread has not: its buffers then stay."""
        num_threads = torch.get_num_threads()
        cropped = {product.cropped(num_threads) for product in products}
        not_run = [product for product in cropped if (num_threads, product) not in self._ran]
        with torch.no_grad():
            for product in sorted(not_run, key=_packed_bytes, reverse=True):
                product.run()
                self._ran.add((num_threads, product))
        if not_run:
            trim_heap()


library_buffers = LibraryBuffers()


def _packed_bytes(product: Product) -> int:
    """Returns a number that grows with the buffer that ``product`` needs."""
    return product.inner * (product.rows + product.columns) * product.dtype.itemsize


def _products(gm: fx.GraphModule) -> Iterator[Product]:
    """Yields the matrix products on CPU in ``gm`` that a library multiplies."""
    for node in gm.graph.nodes:
        name = op_name(node) if node.op == "call_function" else ""
        if "attention" in name:
            yield _ATTENTION
        if name not in _FACTORS:
            continue
        position = _FACTORS[name]
        left, right = node.args[position : position + 2]
        if not is_tensor(left) or left.meta["val"].device.type != "cpu":
            continue
        if left.meta["val"].dtype not in _TYPES:
            continue
        (*batch, rows, inner), columns = shape_of(left), shape_of(right)[-1]
        if min(*batch, rows, inner, columns, 1):  # some element is computed
            yield Product(
                rows=rows,
                inner=inner,
                columns=columns,
                batch=batch[0] if batch else 1,
                dtype=left.meta["val"].dtype,
            )
