"""The error that ends a run."""

from __future__ import annotations


class StageFailedError(Exception):
    """A run failed. `user_error` says whether the data or the settings are at fault rather than the code."""

    def __init__(self, message: str, *, user_error: bool) -> None:
        super().__init__(message)
        self.user_error = user_error
