"""Listeners hear what stages report, at their own pace."""

from __future__ import annotations

import pytest

from dagster_project.lib import progress


def test_each_listener_hears_at_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    terminal: list[str] = []
    log: list[str] = []
    with progress.listening(terminal.append, 1.0), progress.listening(log.append, 10.0):
        for second in range(25):
            now[0] = float(second)
            progress.report_step("model", second, 25, 0.5)
    progress.report("nobody listens")
    assert len(terminal) == 24
    assert log == ["model: step 10 of 25, loss 0.5000", "model: step 20 of 25, loss 0.5000"]


def test_listeners_leave_when_a_stage_fails() -> None:
    heard: list[str] = []
    with pytest.raises(ValueError, match="broken"), progress.listening(heard.append, 0.0):
        raise ValueError("broken")
    progress.report("after")
    assert heard == []
