"""An Evidently metric: how far the centroid of an embedding moved.

Evidently's own `EmbeddingsDrift` takes 12-22 s for a thousand rows, whatever its method. Importing this module
imports Evidently (seconds), so callers import it inside functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from evidently.core.metric_types import SingleValue, SingleValueCalculation, SingleValueMetric
from numpy.typing import NDArray

from monitoring.embedding import centroid_shift


class EmbeddingShift(SingleValueMetric):  # type: ignore[misc]
    """Distance of the centroids over the reference's spread; `columns` are the embedding's dimensions."""

    columns: list[str]

    def _default_tests(self, context: Any = None) -> list[Any]:
        return []


class EmbeddingShiftCalculation(SingleValueCalculation[EmbeddingShift]):  # type: ignore[misc]
    """Computes `EmbeddingShift`."""

    def calculate(self, context: Any, current_data: Any, reference_data: Any) -> tuple[SingleValue, None]:
        """Compare the current rows with the reference rows."""
        current, reference = (self._matrix(data) for data in (current_data, reference_data))
        return self.result(value=centroid_shift(current, reference)), None

    def _matrix(self, data: Any) -> NDArray[np.float64]:
        """Rows of the embedding; those without one (a shorter column is padded with NaN) are left out."""
        matrix: NDArray[np.float64] = data.as_dataframe()[self.metric.columns].dropna().to_numpy(dtype=np.float64)
        return matrix

    def display_name(self) -> str:
        """Title in reports."""
        return "Embedding centroid shift"
