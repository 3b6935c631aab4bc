"""From how many ads on a beam is faster than the full scan; below that, the scan is the better tier.

Times of the scan grow with the number of ads, those of a beam hardly do: the crossover is where the line of
the scan meets the beam's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from models.index.monn import RetrievalModel, UserState
from models.index.publish import Index
from models.index.search import beam_search, exact_search


@dataclass(frozen=True)
class Crossover:
    """Median milliseconds of one call with the same requests, and what follows from them."""

    num_ads: int
    exact_ms: float
    beam_ms: float

    @property
    def crossover_ads(self) -> int:
        """Number of ads at which both would take equally long."""
        return round(self.num_ads * self.beam_ms / self.exact_ms)

    @property
    def exact_is_faster(self) -> bool:
        """True for small inventories: the default tier should be the scan."""
        return self.num_ads < self.crossover_ads

    @property
    def reason(self) -> str:
        """One line for the log."""
        return (
            f"{self.num_ads} ads: scan {self.exact_ms:.2f} ms, beam {self.beam_ms:.2f} ms; "
            f"the beam is faster from about {self.crossover_ads} ads on"
        )


def measure_crossover(
    model: RetrievalModel, index: Index, state: UserState, *, beams: Sequence[int], k: int = 10, repeats: int = 7
) -> Crossover:
    """Time both searches in turn on the same requests, after one warm-up each."""
    exact_s: list[float] = []
    beam_s: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        exact_search(model, index, state, k)
        middle = time.perf_counter()
        beam_search(model, index, state, beams=beams, k=k)
        exact_s.append(middle - started)
        beam_s.append(time.perf_counter() - middle)
    return Crossover(
        num_ads=index.num_ads,
        exact_ms=1e3 * statistics.median(exact_s[1:]),
        beam_ms=1e3 * statistics.median(beam_s[1:]),
    )
