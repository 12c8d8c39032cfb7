"""Lower bounds of the height that hold for every placement."""

import numpy as np

from memo_compile.planners.placement.instance import FREE, Instance, Ints


def section_bounds(instance: Instance) -> Ints:
    """(S,) bytes that the buffers live in each section need at least.

    Live buffers stand on each other, and all but the top one are followed by padding up to the
    common alignment. A fixed buffer is never lower than its end.
    """
    padded = instance.padded
    stacked = instance.loads(padded)
    slack = np.zeros(instance.num_sections, dtype=np.int64)
    _raise_to(instance, slack, padded - instance.size)
    bounds = stacked - slack
    ends = np.where(instance.fixed == FREE, 0, instance.fixed + instance.size)
    _raise_to(instance, bounds, ends)
    return bounds


def lower_bound(instance: Instance) -> int:
    """Bytes: the largest of the sections' bounds; 0 without buffers."""
    return int(section_bounds(instance).max(initial=0))


def _raise_to(instance: Instance, per_section: Ints, per_buffer: Ints) -> None:
    """Raises each section in place to the largest value of a buffer that is live in it."""
    of_span = per_buffer[instance.owner]
    for g in np.flatnonzero(of_span > 0):
        view = per_section[instance.span_lower[g] : instance.span_upper[g]]
        np.maximum(view, of_span[g], out=view)
