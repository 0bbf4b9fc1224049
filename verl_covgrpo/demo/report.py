"""What the demo shows at the end: a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REWARD = "critic/score/mean"
ENTROPY = "actor/entropy"
WEIGHTS = (
    ("covgrpo/weight_std", "std of the token weights"),
    ("covgrpo/effective_share", "effective share of tokens"),
    ("covgrpo/suppressed_share", "tokens with a kernel below 0.1"),
    ("covgrpo/positive_weight_mean", "mean weight, positive advantage"),
    ("covgrpo/negative_weight_mean", "mean weight, negative advantage"),
)


@dataclass
class Result:
    """One finished run."""

    method: str
    folder: Path
    rows: list[dict[str, Any]]
    """One per step, as verl's file logger writes them: {"step", "data"}."""
    greedy_before: float
    greedy_after: float
    seconds: float

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was reported."""
        points = [(row["step"], row["data"][key]) for row in self.rows if key in row["data"]]
        return [step for step, _ in points], [float(value) for _, value in points]

    @property
    def validation(self) -> tuple[list[int], list[float]]:
        """Steps and sampled validation accuracies, the first before training."""
        keys = {key for row in self.rows for key in row["data"] if key.startswith("val-core/")}
        return self.series(next(iter(sorted(keys)))) if keys else ([], [])

    def summary(self) -> dict[str, float]:
        """The numbers of the table; first and last mean the mean over a sixth of the steps."""
        _, validation = self.validation
        numbers = {
            "validation accuracy, sampled, before": validation[0],
            "validation accuracy, sampled, after": validation[-1],
            "validation accuracy, greedy, before": self.greedy_before,
            "validation accuracy, greedy, after": self.greedy_after,
        }
        for name, key in (("reward", REWARD), ("entropy (nats)", ENTROPY)):
            values = self.series(key)[1]
            window = max(1, len(values) // 6)
            numbers[f"{name}, first steps"] = _mean(values[:window])
            numbers[f"{name}, last steps"] = _mean(values[-window:])
        for key, name in self._method_metrics():
            values = self.series(key)[1]
            if values:
                numbers[name] = _mean(values)
        step_times = self.series("timing_s/step")[1]
        numbers["seconds per step"] = _mean(step_times)
        numbers["minutes in all"] = self.seconds / 60
        return numbers

    def _method_metrics(self) -> list[tuple[str, str]]:
        """Key and name of what the method reported; those of covgrpo in words."""
        if self.method.startswith("covgrpo"):
            return list(WEIGHTS)
        own = {key for row in self.rows for key in row["data"] if key.startswith(f"{self.method}/")}
        return [(key, key) for key in sorted(own) if not key.endswith(("/tokens", "/seconds"))]

    def save(self) -> None:
        (self.folder / "summary.json").write_text(json.dumps(self.summary(), indent=2) + "\n")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def table(results: Sequence[Result], title: str) -> Any:
    """A rich table, one column per run."""
    from rich.table import Table

    rendered = Table(title=title, title_justify="left")
    rendered.add_column("")
    for result in results:
        rendered.add_column(result.method, justify="right")
    summaries = [result.summary() for result in results]
    names: Iterable[str] = dict.fromkeys(name for summary in summaries for name in summary)
    ordered = [name for name in names if not name.startswith(("seconds", "minutes"))]
    ordered += [name for name in names if name.startswith(("seconds", "minutes"))]
    for name in ordered:
        cells = [f"{summary[name]:.3f}" if name in summary else "" for summary in summaries]
        rendered.add_row(name, *cells)
    return rendered


def plot(results: Sequence[Result], path: Path) -> Path:
    """Draw reward and entropy by step, with the validation accuracies, into a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, result in enumerate(results):
        color = f"C{number}"
        for axes, key in ((left, REWARD), (right, ENTROPY)):
            steps, values = result.series(key)
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _smooth(values), color=color, linewidth=2, label=result.method)
        steps, accuracy = result.validation
        left.plot(
            steps, accuracy, "o--", color=color, label=f"{result.method}, validation (sampled)"
        )
    left.set(title="reward", xlabel="step", ylabel="share of right answers")
    right.set(title="entropy of the policy", xlabel="step", ylabel="nats per token")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _smooth(values: Sequence[float], window: int = 7) -> list[float]:
    """Running mean over `window` steps around each."""
    half = window // 2
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
