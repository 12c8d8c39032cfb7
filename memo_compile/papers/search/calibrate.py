"""Fits the cost model's shares to a handful of measured runs.

Least squares of log(predicted / measured) over the logarithms of the shares, with a prior around
the defaults: few runs move only the shares that they say something about. Gauss-Newton with
numerical derivatives; each step is halved until the sum of squares falls.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memo_compile.costs.hardware import HardwareProfile
from memo_compile.errors import InputError
from memo_compile.papers.lynx.fields import number, read_object
from memo_compile.papers.search.cost import CostModel, Workload, describe_workload, evaluate
from memo_compile.papers.search.measurements import Measurement
from memo_compile.papers.search.space import columns_of

NOISE = 0.02
"""Relative standard deviation of a measured time: how runs on large clusters differ."""

PRIOR_SPREAD = {
    "gemm_efficiency": 0.20,
    "hbm_efficiency": 0.10,
    "link_efficiency": 0.30,
    "network_efficiency": 0.50,
    "host_efficiency": 0.50,
    "chunk_overhead_s": 1.00,
}
"""Standard deviation of each share's logarithm around its default: how little is known of it."""

MAX_ROUNDS = 50
DERIVATIVE_STEP = 1e-4
SMALLEST_STEP = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The fitted shares and how well they explain each run."""

    model: CostModel
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, less one, for each run."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return tuple(predicted / measured - 1 for predicted, measured in pairs)


def calibrate(runs: Sequence[Measurement], hardware: HardwareProfile) -> Fit:
    """Returns the shares that explain ``runs`` best; shares stay at most 1."""
    spread = np.array(list(PRIOR_SPREAD.values()))
    default_logs = np.log([getattr(CostModel(), name) for name in PRIOR_SPREAD])
    # The logarithm of a share is at most 0; seconds have no bound.
    most_logs = np.array([np.inf if name.endswith("_s") else 0.0 for name in PRIOR_SPREAD])
    measured = np.array([run.iteration_s for run in runs])
    predict = _predictor(runs, hardware)

    def residuals(logs: Any) -> Any:
        errors = np.log(predict(_model(logs)) / measured) / NOISE
        return np.concatenate([errors, (logs - default_logs) / spread])

    logs = _gauss_newton(residuals, default_logs, most_logs)
    model = _model(logs)
    predicted_s = predict_seconds(runs, hardware, model)
    return Fit(model=model, predicted_s=predicted_s, measured_s=tuple(measured.tolist()))


def predict_seconds(
    runs: Sequence[Measurement], hardware: HardwareProfile, model: CostModel
) -> tuple[float, ...]:
    """Returns the seconds of each run's step as ``model`` predicts them."""
    return tuple(float(seconds) for seconds in _predictor(runs, hardware)(model))


def read_cost_model(path: Path) -> CostModel:
    """Returns the shares that ``memo calibrate --json`` printed into ``path``.

    Raises InputError: not such a file, or a share is unknown, not positive, or above 1.
    """
    data = read_object(path)
    shares = data.get("model", data)
    names = {field.name for field in dataclasses.fields(CostModel)}
    if not isinstance(shares, dict) or not set(shares) <= names:
        raise InputError(f"{path}: model: expected an object with {', '.join(sorted(names))}")
    for name in shares:
        value = number(shares, name)
        if value == 0 or (value > 1 and not name.endswith("_s")):
            raise InputError(f"{path}: {name}: expected a share in (0, 1], got {value}")
    return CostModel(**shares)


def _model(logs: Any) -> CostModel:
    """Returns the model whose shares, in the order of PRIOR_SPREAD, have these logarithms."""
    shares = zip(PRIOR_SPREAD, logs, strict=True)
    return CostModel(**{name: float(np.exp(share)) for name, share in shares})


def _predictor(runs: Sequence[Measurement], hardware: HardwareProfile) -> Any:
    """Returns a function from a cost model to the predicted seconds of each run."""
    works = [describe_workload(run.shape, run.seq, run.global_batch) for run in runs]
    names = [field.name for field in dataclasses.fields(Workload)]
    rows = {name: np.stack([getattr(work, name) for work in works], axis=-1) for name in names}
    stacked = Workload(**rows)
    columns = columns_of(run.config for run in runs)
    alpha = np.array([run.alpha for run in runs])

    def predict(model: CostModel) -> Any:
        return evaluate(stacked, columns, hardware, model, np.inf, alpha=alpha).iteration_s

    return predict


def _gauss_newton(residuals: Any, start: Any, most: Any) -> Any:
    """Returns the point below ``most`` with the least sum of squared residuals, near ``start``."""
    point, errors = start, residuals(start)
    for _ in range(MAX_ROUNDS):
        steps = DERIVATIVE_STEP * np.eye(len(point))
        changes = [residuals(point + step) - errors for step in steps]
        jacobian = np.stack(changes, axis=1) / DERIVATIVE_STEP
        direction = np.linalg.lstsq(jacobian, -errors, rcond=None)[0]
        scale = 1.0
        while scale > SMALLEST_STEP:
            candidate = np.minimum(point + scale * direction, most)
            new_errors = residuals(candidate)
            if new_errors @ new_errors < errors @ errors * (1 - 1e-10):
                break
            scale /= 2
        else:  # no step makes the sum smaller
            return point
        point, errors = candidate, new_errors
    return point
