"""Models whose layers do not repeat gain from a budget: ``python -m benchmarks.architectures``.

Real architectures, unmodified, from configs: ResNet-50, ConvNeXt-T and Swin-T of transformers, or
of timm where it is installed, and the UNet of diffusers where that is. Each in a process of its
own: the floor that a budget of one byte names, the peak without a budget, then three steps with SGD
under the budget halfway between, and their physical peaks. Three more in float64, a tenth above its
own floor, have their gradients compared with eager's: in float32 a ResNet that was not trained,
with a batch norm over four images, makes 0.02 of a difference of 1e-7 in the first step, and 1.4 in
the third.

Activations are what a peak holds beside parameters, buffers, gradients and inputs. Passes when the
floor's are at most 0.7 of those without a budget, when no step exceeds the budget, and when the
gradients differ from eager's by at most 1e-6 of their norm.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from memo_compile.units import format_bytes

MODULE = "benchmarks.architectures"
SIZES = {"batch": 4, "pixels": 224}
NUM_STEPS = 3
MAX_FLOOR = 0.7
MAX_OF_BUDGET = 1.0
MAX_ERROR = 1e-6
ABOVE_FLOOR = 1.1
TIMEOUT_S = 3600.0
"""For a model. The UNet takes five minutes of a core, three times that where others use it too."""


def main() -> int:
    """Measure every model in a process of its own, print the table, judge."""
    return harness.run_benchmark("architectures", arguments(), measure, run_child)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__, sizes=SIZES)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--lowering", default="aten", choices=("aten", "inductor"))
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All models, and the verdict."""
    shared = harness.passed_on(options, *SIZES, "lowering")
    rows, left_out = [], []
    for name in options.models.split(","):
        if any(importlib.util.find_spec(package) is None for package in MODELS[name][0]):
            left_out.append(name)
            continue
        print(name, file=sys.stderr, flush=True)
        arm = harness.Arm(name=name, arguments=(f"--child={name}", *shared))
        rows.append({"model": name, **harness.run_arm(MODULE, arm, timeout_s=TIMEOUT_S)})
    show(rows)
    for name in left_out:
        print(f"left out, {', '.join(MODELS[name][0])} is not installed: {name}", file=sys.stderr)
    return {"rows": rows, "left_out": left_out, "failures": judge(rows)}


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One model: its floor, its peak without a budget, and steps halfway between."""
    floor = floor_bytes(options)
    unbounded = _Training(options, None)
    unbounded.step()
    most = harness.memo_plan().peak_bytes
    budget = (floor + most) // 2
    planned = _Training(options, budget)
    peaks = []
    for _ in range(NUM_STEPS):
        peaks.append(planned.measured_step())
        planned.optimizer.step()
    plan, constant = harness.memo_plan(), planned.constant_bytes()
    return {
        "library": planned.library,
        "constant_bytes": constant,
        "floor_bytes": floor,
        "unbounded_bytes": most,
        "budget_bytes": budget,
        "planned_bytes": plan.peak_bytes,
        "peaks_bytes": peaks,
        "errors": gradient_errors(options),
        "floor_over_unbounded": (floor - constant) / (most - constant),
    }


def gradient_errors(options: argparse.Namespace) -> list[float]:
    """Of each step in float64, whose kernels have another floor."""
    budget = int(ABOVE_FLOOR * floor_bytes(options, is_double=True))
    eager = _Training(options, "eager", is_double=True)
    planned = _Training(options, budget, is_double=True)
    errors = []
    for _ in range(NUM_STEPS):
        for training in (eager, planned):
            training.step()
        errors.append(planned.error_against(eager))
        for training in (eager, planned):
            training.optimizer.step()
    return errors


def floor_bytes(options: argparse.Namespace, *, is_double: bool = False) -> int:
    """The smallest budget that memo can keep: what its refusal of one byte names."""
    import torch

    from memo_compile.errors import Infeasible

    try:
        _Training(options, 1, is_double=is_double).step()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, Infeasible) and inner.floor_bytes is not None:
            return inner.floor_bytes
        raise
    raise RuntimeError("a budget of one byte was accepted")


class _Training:
    """A model, its inputs, and one way to run it: eager, or memo under a budget (None: without)."""

    def __init__(
        self, options: argparse.Namespace, way: int | str | None, *, is_double: bool = False
    ) -> None:
        import torch

        torch._dynamo.reset()
        torch.manual_seed(0)
        build = MODELS[options.child][1]
        self.model, self.inputs, self.library = build(options.batch, options.pixels)
        self.model.train()
        if is_double:
            self.model.double()
            self.inputs = [
                given.double() if given.is_floating_point() else given for given in self.inputs
            ]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._loss: Callable[..., Any] = self._loss_of
        if way != "eager":
            memo = {
                "memory_budget": way,
                "lowering": options.lowering,
                "costs": "roofline",
                "optimizer_state_bytes_per_parameter": 0,
                "strict": True,
            }
            self._loss = torch.compile(self._loss_of, backend="memo", options=memo)

    def _loss_of(self, *inputs: Any) -> Any:
        result = self.model(*inputs)
        for name in ("logits", "sample"):
            result = getattr(result, name, result)
        return (result**2).mean()

    def step(self) -> None:
        """Forward and backward with new gradients."""
        self.model.zero_grad(set_to_none=True)
        self._loss(*self.inputs).backward()

    def measured_step(self) -> int:
        """``step``; its physical peak, from the planned forward's entry."""
        import contextlib
        from unittest import mock

        from memo_compile.driver import assemble

        run_forward = assemble.run_forward
        seen: list[harness.Peak] = []
        self.model.zero_grad(set_to_none=True)
        with contextlib.ExitStack() as watch:

            def watched(*args: Any) -> Any:
                held = harness.held_bytes(self.model, None, self.inputs)
                seen.append(watch.enter_context(harness.physical_peak("cpu", held)))
                return run_forward(*args)

            with mock.patch.object(assemble, "run_forward", watched):
                self.step()
        return seen[0].peak_bytes

    def constant_bytes(self) -> int:
        """Parameters, buffers, gradients and inputs."""
        return harness.held_bytes(self.model, None, self.inputs)

    def error_against(self, other: "_Training") -> float:
        """The norm of the gradients' difference over the norm of ``other``'s."""
        import torch

        ours, theirs = (
            torch.cat([p.grad.flatten() for p in training.model.parameters() if p.grad is not None])
            for training in (self, other)
        )
        return float((ours - theirs).norm() / theirs.norm())


def _images(batch: int, pixels: int, channels: int = 3) -> Any:
    import torch

    return torch.randn(batch, channels, pixels, pixels, generator=torch.Generator().manual_seed(1))


def _classifier(timm_name: str, family: str) -> Callable[[int, int], tuple[Any, list[Any], str]]:
    """Builds ``timm_name`` of timm, or the same architecture of transformers' ``family``."""

    def build(batch: int, pixels: int) -> tuple[Any, list[Any], str]:
        images = [_images(batch, pixels)]
        if importlib.util.find_spec("timm") is not None:
            import timm

            return timm.create_model(timm_name, pretrained=False), images, "timm"
        import transformers

        config = getattr(transformers, f"{family}Config")(image_size=pixels, drop_path_rate=0.0)
        model = getattr(transformers, f"{family}ForImageClassification")(config)
        return model, images, "transformers"

    return build


def _unet(batch: int, pixels: int) -> tuple[Any, list[Any], str]:
    """The UNet of latent diffusion with narrower blocks: 64 to 256 channels, text of 77 tokens."""
    import torch
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=pixels // 8,
        block_out_channels=(64, 128, 256, 256),
        cross_attention_dim=128,
        attention_head_dim=8,
    )
    generator = torch.Generator().manual_seed(2)
    inputs = [
        _images(batch, pixels // 8, channels=4),
        torch.randint(1000, (batch,), generator=generator),
        torch.randn(batch, 77, 128, generator=generator),
    ]
    return model, inputs, "diffusers"


MODELS: dict[str, tuple[tuple[str, ...], Callable[[int, int], tuple[Any, list[Any], str]]]] = {
    "resnet50": (("transformers",), _classifier("resnet50", "ResNet")),
    "convnext_tiny": (("transformers",), _classifier("convnext_tiny", "ConvNext")),
    "swin_tiny": (("transformers",), _classifier("swin_tiny_patch4_window7_224", "Swin")),
    "unet": (("diffusers",), _unet),
}
"""Name -> the packages that it needs, and what builds it for a batch of square images."""


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """The promises that do not hold, as sentences."""
    failures = []
    for row in rows:
        name, budget, peak = row["model"], row["budget_bytes"], max(row["peaks_bytes"])
        if row["floor_over_unbounded"] > MAX_FLOOR:
            failures.append(
                f"{name}: the floor's activations are {row['floor_over_unbounded']:.3f} of those "
                f"without a budget, expected at most {MAX_FLOOR}"
            )
        if peak > MAX_OF_BUDGET * budget:
            failures.append(f"{name}: {peak} B measured under a budget of {budget} B")
        failures += [
            f"{name}: gradients in float64 differ from eager's by {error:.1e}"
            for error in row["errors"]
            if error > MAX_ERROR
        ]
    return failures


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    harness.print_table(
        f"budgets halfway between floor and none, {NUM_STEPS} steps",
        ("model", "of", "constant", "floor", "unbounded", "floor / unb.", "measured / budget"),
        [
            (
                row["model"],
                row["library"],
                format_bytes(row["constant_bytes"]),
                format_bytes(row["floor_bytes"]),
                format_bytes(row["unbounded_bytes"]),
                f"{row['floor_over_unbounded']:.3f}",
                f"{max(row['peaks_bytes']) / row['budget_bytes']:.3f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main())
