"""What Dynamo never handed to memo: code around graph breaks, functions that it gave up."""

from dataclasses import dataclass, field

from memo_compile import shim
from memo_compile.reporting import state


@dataclass(slots=True)
class DynamoWatch:
    """Counts since ``begin``; torch's own counters are of the whole process."""

    breaks: dict[str, int] = field(default_factory=dict)
    given_up: int = 0

    def begin(self) -> None:
        """Count from here."""
        self.breaks, self.given_up = shim.dynamo_counts()

    def left_out(self) -> state.LeftOut:
        """Notes for the report, and whether Dynamo runs a function eagerly for good."""
        breaks, given_up = shim.dynamo_counts()
        new = {why: n - self.breaks.get(why, 0) for why, n in breaks.items()}
        new = {why: n for why, n in new.items() if n > 0}
        notes = []
        if new:
            notes.append(
                f"{sum(new.values())} graph break(s): what lies between runs eagerly, each graph "
                f"is planned by itself, and memory_budget bounds each, not their sum. First: "
                f"{next(iter(new))} (torch.compile(fullgraph=True) shows where)"
            )
        gave_up = given_up > self.given_up
        if gave_up:
            notes.append(
                "memo is OFF for a function: Dynamo gave it up after too many compilations and "
                "runs it eagerly. Pad to fewer shapes, or leave dynamic at its default"
            )
        return tuple(notes), gave_up
