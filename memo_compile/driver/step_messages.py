"""Messages for steps that need more memory than their plan, and for those refused because of it."""

from collections.abc import Mapping

from memo_compile.units import format_bytes, format_enough

NO_FLOOR = (
    "Or raise memory_budget; to how much is not known, for under a larger one the step may have a "
    "larger plan"
)
"""Ends a message where what is needed beside a plan grows with the plan."""

NO_SMALLER = "no smaller plan was found from there; one may fit with a lower memory_budget"
"""Ends a message where an arena is refused, and full recomputation needs none that is smaller."""


def taken_beyond(num_bytes: int, could_not_run: Mapping[str, str]) -> str:
    """Says that ``num_bytes`` were taken beside the plan, and by what they may have been."""
    text = (
        f"{format_bytes(num_bytes)} that no plan knows of were taken while a step ran, which may "
        "have exceeded memory_budget: "
    )
    if could_not_run:
        text += (
            "in a first step by what libraries keep for the kernels of regions that could not run "
            f"before it ({'; '.join(could_not_run.values())}), or "
        )
    return text + (
        "by a loss, a penalty or other graphs outside the compiled function. Compute them inside, "
        "or lower memory_budget by that"
    )


def not_gone(peak: int, budget: int, waiting: int) -> str:
    """Says why a backward is stopped: ``waiting`` bytes of gradients are not freed."""
    return (
        f"this backward would need {format_enough(peak)} > memory_budget {format_bytes(budget)}, "
        f"and has been stopped. {format_bytes(waiting)} of gradients are still there after they "
        "were given to autograd: their parameters are used outside of this graph too, or a hook "
        "keeps them. Steps from now on are planned for that; or raise memory_budget"
    )


def no_room(
    peak: int,
    budget: int,
    *,
    held: int,
    second_gradients: int,
    staying: int,
    copied: int,
    keeps_outputs: bool,
) -> str:
    """Says what a backward needs beside its plan, and what to do about it.

    A step that ``keeps_outputs`` was planned with its own results held; ``held`` are others'.
    """
    advice = "let go of them" if keeps_outputs else "set outputs='held', or let go of them"
    why = {
        "results of forwards that are held, though they were planned as gone by now; "
        f"{advice}": held,
        "gradients that stay to the end of the backward, because retain_graph=True, create_graph="
        "True, torch.autograd.grad or inputs= are used": staying,
        "gradients of this graph's first backward; add the losses up and call backward "
        "once": second_gradients,
        "the copy of the arena that retain_graph=True makes; add the losses up and call backward "
        "once, or run the forward twice": copied,
    }
    parts = "; ".join(f"{format_bytes(size)}: {what}" for what, size in why.items() if size)
    raised = f". {NO_FLOOR}" if copied else "; or raise memory_budget"
    return (
        f"this backward would need {format_enough(peak)} > memory_budget {format_bytes(budget)}, "
        f"and has not begun. Beside its plan: {parts}{raised}"
    )
