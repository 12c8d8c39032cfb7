"""Random models whose blocks are compiled one by one, in random modes: all numbers as in eager.

Budgets go from the floor of the group up. A step that a budget refuses must say so before it
computes anything wrong: the steps behind it are compared all the same.
``python -m tests.numerics.group_attack 100 160`` tries seeds 100 to 159.
"""

import contextlib
import copy
import functools
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memo_compile
from memo_compile.errors import Infeasible
from memo_compile.reporting import state
from tests.steps.running import WIDTH, Block

LIMIT = 1e-5
"""Of each parameter's largest gradient: sums in another order, after optimizer steps too."""

POLICIES = ("save", "full-offload", "full-recompute", "memo")
SHARES = (0.0, 0.02, 0.2, 0.6, 1.0)
"""Budgets: how far from the group's floor to what keeping everything needs."""

TRAITS = ("llama", "tied", "frozen", "scaled", "held", "wide", "declared", "mixed")
"""What a case may have: the gated block; one weight in entry and head; a block without gradients;
user code with saved tensors between the blocks; all results of blocks held to the end; a head whose
logits are larger than the blocks' activations; ``memo_compile.group``; blocks of two kinds, which
are two graphs."""


class Model(nn.Module):
    """Blocks between an entry and a head; the forward of the model is the user's code."""

    def __init__(self, traits: frozenset[str], num_layers: int) -> None:
        super().__init__()
        self.traits = traits
        self.num_words = 3001 if "wide" in traits else 61
        self.entry = nn.Embedding(self.num_words, WIDTH)
        gated = [
            ("llama" in traits) != ("mixed" in traits and at % 2 == 1) for at in range(num_layers)
        ]
        self.layers = nn.ModuleList(map(Block, gated))
        self.head = nn.Linear(WIDTH, self.num_words, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if "tied" in traits:
            self.head.weight = self.entry.weight
        if "frozen" in traits:
            self.layers[num_layers // 2].requires_grad_(False)

    def words(self, seed: int) -> torch.Tensor:
        size = (2, 129) if "wide" in self.traits else (2, 17)
        return torch.randint(self.num_words, size, generator=torch.Generator().manual_seed(seed))

    def forward(self, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        return self.loss(self.through(self.entry(ids), **how), ids)

    def through(
        self,
        x: torch.Tensor,
        call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda layer, x: layer(x),
        order: Callable[[int], Iterator[int]] = lambda count: iter(range(count)),
        seen: Callable[[int, torch.Tensor], None] = lambda at, x: None,
    ) -> torch.Tensor:
        held = []
        for at in order(len(self.layers)):
            x = call(self.layers[at], x)
            if "scaled" in self.traits:
                x = x * self.scale
            if "held" in self.traits:
                held.append(x)
            seen(at, x)
        return x if not held else x + sum(made.mean() for made in held)

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.roll(-1, 1).flatten())


@dataclass
class Run:
    """One of the twins, and what it computed beside gradients."""

    model: Model
    extra: list[torch.Tensor] = field(default_factory=list)

    def sgd(self) -> None:
        with torch.no_grad():
            for own in self.model.parameters():
                if own.grad is not None:
                    own -= 0.05 * own.grad

    def back(self, loss: torch.Tensor, **how: Any) -> None:
        self.extra.append(loss.detach().clone())
        loss.backward(**how)


Mode = Callable[[Run, int, random.Random], None]


def _plain(run: Run, seed: int, rng: random.Random) -> None:
    run.back(run.model(run.model.words(seed)))


def _accumulated(run: Run, seed: int, rng: random.Random) -> None:
    for more in range(3):
        run.back(run.model(run.model.words(seed + more)))


def _evaluation(run: Run, seed: int, rng: random.Random) -> None:
    model, ids = run.model, run.model.words(seed)
    with torch.no_grad():
        run.extra.append(model(ids))
    model.eval()
    run.extra.append(model(ids).detach())  # with a graph that nobody uses
    model.train()
    loss = model(ids)
    with torch.no_grad():
        run.extra.append(model(run.model.words(seed + 1)))
    run.back(loss)


def _retained(run: Run, seed: int, rng: random.Random) -> None:
    loss = run.model(run.model.words(seed))
    run.back(loss, retain_graph=True)
    run.back(loss)


def _grad_first(run: Run, seed: int, rng: random.Random) -> None:
    made: list[torch.Tensor] = []
    loss = run.model(run.model.words(seed), seen=lambda at, x: made.append(x))
    own = made[rng.randrange(len(made))]
    run.extra += torch.autograd.grad(loss, own, retain_graph=True)
    run.back(loss)


def _fails_in_forward(run: Run, seed: int, rng: random.Random) -> None:
    worst = rng.randrange(len(run.model.layers))

    def seen(at: int, x: torch.Tensor) -> None:
        if at == worst:
            raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        run.model(run.model.words(seed), seen=seen)
    run.back(run.model(run.model.words(seed + 1)))


def _fails(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def _fails_in_backward(run: Run, seed: int, rng: random.Random) -> None:
    worst = rng.randrange(len(run.model.layers))

    def seen(at: int, x: torch.Tensor) -> None:
        if at == worst:
            x.register_hook(_fails)

    before = [None if own.grad is None else own.grad.clone() for own in run.model.parameters()]
    loss = run.model(run.model.words(seed), seen=seen)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    del loss
    for own, old in zip(run.model.parameters(), before, strict=True):
        own.grad = old
    run.back(run.model(run.model.words(seed + 1)))


def _left_out(run: Run, seed: int, rng: random.Random) -> None:
    skipped = rng.randrange(len(run.model.layers))
    ids = run.model.words(seed)
    run.back(run.model(ids, order=lambda n: (at for at in range(n) if at != skipped)))


def _unused(run: Run, seed: int, rng: random.Random) -> None:
    unused, other = rng.randrange(len(run.model.layers)), run.model.layers
    where = {id(layer): at for at, layer in enumerate(other)}

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made = layer(x)
        return x * 2 if where[id(layer)] == unused else made

    run.back(run.model(run.model.words(seed), call=call))


def _shuffled(run: Run, seed: int, rng: random.Random) -> None:
    order = list(range(len(run.model.layers)))
    rng.shuffle(order)
    run.back(run.model(run.model.words(seed), order=lambda n: iter(order)))


def _one_twice(run: Run, seed: int, rng: random.Random) -> None:
    again = rng.randrange(len(run.model.layers))
    run.back(run.model(run.model.words(seed), order=lambda n: iter([*range(n), again])))


def _backwards_apart(run: Run, seed: int, rng: random.Random) -> None:
    """Every block has a backward of its own, in a random order."""
    x = run.model.entry(run.model.words(seed)).detach().requires_grad_()
    losses = [layer(x).square().mean() for layer in run.model.layers]
    rng.shuffle(losses)
    while losses:
        run.back(losses.pop())


def _reentrant(run: Run, seed: int, rng: random.Random) -> None:
    ids = run.model.words(seed)
    run.back(run.model(ids, call=lambda layer, x: checkpoint(layer, x, use_reentrant=True)))


def _checkpointed(run: Run, seed: int, rng: random.Random) -> None:
    ids, chosen = run.model.words(seed), rng.random()

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if chosen < 0.8 else layer(x)

    run.back(run.model(ids, call=call))


def _two_live(run: Run, seed: int, rng: random.Random) -> None:
    first, second = (run.model(run.model.words(seed + at)) for at in range(2))
    if rng.random() < 0.5:
        run.back(first + 3 * second)
    else:
        run.back(second)
        run.back(first)


def _two_threads(run: Run, seed: int, rng: random.Random) -> None:
    leaves = [own for own in run.model.parameters() if own.requires_grad]
    found: dict[int, Any] = {}

    def work(at: int) -> None:
        try:
            loss = run.model(run.model.words(seed + at))
            found[at] = torch.autograd.grad(loss, leaves, allow_unused=True)
        except BaseException as error:
            found[at] = error

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(2):
        if isinstance(found[at], BaseException):
            raise found[at]
        run.extra += [grad for grad in found[at] if grad is not None]


def _another_length(run: Run, seed: int, rng: random.Random) -> None:
    ids = run.model.words(seed)[:, : rng.choice([9, 16])]
    run.back(run.model(ids))
    run.back(run.model(ids))


MODES: Mapping[str, Mode] = {
    mode.__name__.lstrip("_"): mode
    for mode in (
        _plain,
        _accumulated,
        _evaluation,
        _retained,
        _grad_first,
        _fails_in_forward,
        _fails_in_backward,
        _left_out,
        _unused,
        _shuffled,
        _one_twice,
        _backwards_apart,
        _reentrant,
        _checkpointed,
        _two_live,
        _two_threads,
        _another_length,
    )
}


@dataclass(frozen=True)
class Case:
    traits: frozenset[str]
    num_layers: int
    policy: str
    share: float | None
    """Of a budget; None: there is none."""
    schedule: str
    modes: tuple[str, ...]
    zeroes: bool

    def options(self) -> dict[str, Any]:
        return {
            "lowering": "aten",
            "strict": True,
            "costs": "roofline",
            "token_granule": 4,
            "debug": ("poison", self.schedule),
            "policy": self.policy,
            "optimizer_state_bytes_per_parameter": 0,
        }


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    has_budget = rng.random() < 0.5
    return Case(
        traits=frozenset(rng.sample(TRAITS, rng.randrange(5))),
        num_layers=rng.choice([2, 3, 4, 5]),
        policy="auto" if has_budget else rng.choice(POLICIES),
        share=rng.choice(SHARES) if has_budget else None,
        schedule=rng.choice(["copies-early", "copies-late"]),
        modes=tuple(rng.sample(sorted(MODES), 4)),
        zeroes=rng.random() < 0.6,
    )


def compiled(case: Case, seed: int, budget: int | None) -> Model:
    """The case's model, its blocks compiled for ``budget``."""
    torch._dynamo.reset()
    state.reset()
    torch.manual_seed(seed)
    model, options = Model(case.traits, case.num_layers), case.options()
    if budget is not None:
        options["memory_budget"] = budget
    if "declared" in case.traits:
        memo_compile.group(model.layers, **options)
    else:
        for layer in model.layers:
            layer.compile(backend="memo", options=options)
    return model


def floor_of(case: Case, seed: int) -> int:
    """The smallest budget whose refusals name no other: of the block, then of the group."""
    budget = 1
    for _ in range(4):
        model = compiled(case, seed, budget)
        refused = None
        for at in range(3):
            refused = refusal(functools.partial(_step, model, at))
            model.zero_grad()
            if refused is not None:
                break
        if refused is None:
            return budget
        assert refused.floor_bytes is not None, refused
        assert refused.floor_bytes > budget, f"{refused} names a floor that was refused"
        budget = refused.floor_bytes
    raise AssertionError(f"floor after floor was refused, the last: {budget}")


def _step(model: Model, seed: int) -> None:
    model(model.words(seed)).backward()


def refusal(run: Callable[[], None]) -> Infeasible | None:
    """The error of a step that the budget refuses; None: it ran."""
    try:
        run()
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, Infeasible):
            return Infeasible(str(inner), floor_bytes=inner.floor_bytes)
        raise
    return None


def attack(seed: int) -> Counter[str]:
    """Raise AssertionError where a number differs from eager in case ``seed``; what ran, counted.

    Under a budget at the floor every plain step must run, and none may be refused silently.
    """
    case = drawn(seed)
    budget = None
    if case.share is not None:
        floor = floor_of(case, seed)
        model = compiled(case, seed, None)
        for at in range(2):
            model(model.words(at)).backward()
        plans = memo_compile.report().groups or memo_compile.report().plans
        most = max(floor, *(plan.peak_bytes + plan.fixed.new_gradients for plan in plans))
        budget = floor + int(case.share * (most - floor))
    model = compiled(case, seed, budget)
    twin = Model(case.traits, case.num_layers)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    runs, counted = (Run(model), Run(twin)), Counter[str]()
    for at, mode in enumerate(("plain", "plain", *case.modes, "plain")):
        where = f"seed {seed}, {case}, budget {budget}, mode {mode} ({at})"
        refused = _both(runs, mode, 10 * at, seed + at, where)
        kept = runs[0].model.head.weight.grad is not None  # so that a budget may not do
        assert refused is None or mode != "plain" or kept, f"refused: {refused} in {where}"
        counted["refused"] += refused is not None
        counted["steps"] += 1
        for run in runs:
            run.sgd()
            if case.zeroes or refused is not None or at < 2:
                run.model.zero_grad()
    counted["groups"] += len(memo_compile.report().groups) > 0
    return counted


def _both(runs: tuple[Run, Run], mode: str, seed: int, draw: int, where: str) -> Infeasible | None:
    ours, eager = runs
    before = [None if own.grad is None else own.grad.clone() for own in ours.model.parameters()]
    refused = refusal(lambda: MODES[mode](ours, seed, random.Random(draw)))
    if refused is None:
        MODES[mode](eager, seed, random.Random(draw))
        _compare(ours, eager, where)
    else:
        gc.collect()
        for run in runs:
            for own, old in zip(run.model.parameters(), before, strict=True):
                own.grad = None if old is None else old.clone()
    for run in runs:
        run.extra.clear()
    return refused


def _compare(ours: Run, eager: Run, where: str) -> None:
    grads = (own.grad for own in eager.model.parameters() if own.grad is not None)
    least = 1e-3 * max((float(grad.abs().max()) for grad in grads), default=0.0)
    for name, parameter in eager.model.named_parameters():
        own = ours.model.get_parameter(name).grad
        _assert_equal(own, parameter.grad, f"{name} in {where}", least)
    assert len(ours.extra) == len(eager.extra), where
    for at, (got, expected) in enumerate(zip(ours.extra, eager.extra, strict=True)):
        _assert_equal(got, expected, f"extra {at} in {where}")


def _assert_equal(got: Any, expected: Any, what: str, least: float = 0.0) -> None:
    """``least``: a gradient that is smaller is what rounding leaves of zero."""
    assert (got is None) == (expected is None), f"{what}: got {got}, expected {expected}"
    if expected is not None:
        scale = max(float(expected.abs().max()), least) + 1e-9
        worst = float((got - expected).abs().max()) / scale
        assert worst <= LIMIT, f"{what}: {worst:.1e} apart"


def main(first: int, last: int) -> None:
    failed, counted = 0, Counter[str]()
    for seed in range(first, last):
        try:
            counted += attack(seed)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:900]}", flush=True)
        gc.collect()
    print(f"{last - first} cases, {failed} failed, {dict(counted)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]))
