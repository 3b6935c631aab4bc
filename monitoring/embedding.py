"""Drift of embeddings in plain numpy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def centroid_shift(current_BM: NDArray[np.floating], reference_BM: NDArray[np.floating]) -> float:
    """Distance between the two centroids, in units of the reference rows' RMS distance from theirs.

    Two samples of one distribution of n and m rows differ by about sqrt(1 / n + 1 / m).
    """
    center = reference_BM.mean(axis=0)
    spread = math.sqrt(float(((reference_BM - center) ** 2).sum(axis=1).mean()))
    distance = float(np.linalg.norm(current_BM.mean(axis=0) - center))
    if spread == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / spread
