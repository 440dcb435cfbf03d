"""Means over seeds with 95 % t intervals, and paired differences by seed.

    mean_interval([3.21, 3.25, 3.19])                      # n = 3: mean, deviation, interval
    paired_difference({0: 3.20, 1: 3.24}, {0: 3.22, 1: 3.25})   # a - b, seed by seed

Arms of one seed see the same data and start from equal weights, so their difference varies far less than either loss:
the paired interval is the one to judge by. One seed gives a mean and no interval, never an interval of width zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds, in the unit of the values.

    std   sample standard deviation (n - 1); None for n < 2.
    half  half width of the 95 % t interval; None for n < 2.
    low, high   the interval's ends; None for n < 2.
    mean  None only for a paired difference without a common seed.
    """

    n: int
    mean: float | None
    std: float | None = None
    half: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**asdict(self), "seeds": list(self.seeds)}

    def excludes_zero(self) -> bool | None:
        """Whether the interval lies on one side of zero; None without an interval."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def t_quantile(n: int) -> float:
    """Number of values n >= 2 -> two-sided 95 % quantile of Student's t, n - 1 degrees of freedom (4.303 for n = 3)."""
    if n < 2:
        raise ValueError(f"n: {n} values have no t interval; at least 2 are needed")
    return float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))


def mean_interval(values: Sequence[float]) -> Estimate:
    """Values, one per seed -> mean, sample deviation, 95 % t interval. Raises ValueError for none or a non-finite."""
    if not len(values):
        raise ValueError("values: none given; a mean needs at least one")
    numbers = [float(value) for value in values]
    for number in numbers:
        if not math.isfinite(number):
            raise ValueError(f"values: {number} is not finite; leave failed runs out")
    n = len(numbers)
    mean = math.fsum(numbers) / n
    if n < 2:
        return Estimate(n, mean)
    std = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (n - 1))
    half = t_quantile(n) * std / math.sqrt(n)
    return Estimate(n, mean, std, half, mean - half, mean + half)


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> Estimate:
    """Seed -> value for two arms -> a - b over the seeds both have, with its 95 % t interval; `seeds` lists them.

    One common seed gives the difference and no interval; none gives n = 0 and no mean.
    """
    seeds = tuple(sorted(set(a) & set(b)))
    if not seeds:
        return Estimate(0, None)
    one = mean_interval([a[seed] - b[seed] for seed in seeds])
    return Estimate(one.n, one.mean, one.std, one.half, one.low, one.high, seeds)
