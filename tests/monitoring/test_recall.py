from __future__ import annotations

import math
from pathlib import Path

import pytest

from monitoring.recall import AuditedRequest, audit_rows, recall_report


def audited(request_id: int, user_id: int | None, answered: list[int], exact: list[int], tier: str) -> AuditedRequest:
    return AuditedRequest(request_id, user_id, "feed", tier, "r1", answered, exact, cost=0.1, latency_ms=request_id)


REQUESTS = [
    audited(1, 1, [1, 2, 3, 4], [1, 2, 3, 4], "full"),
    audited(2, 1, [1, 2, 9, 8], [1, 2, 3, 4], "full"),
    audited(3, 2, [9, 8, 7, 1], [1, 2], "lite"),
    audited(4, None, [], [5], "lite"),
    audited(5, 3, [], [], "lite"),
]


def test_rows_by_hand() -> None:
    rows = audit_rows(REQUESTS)
    assert rows.column("recall_vs_exact").to_pylist()[:4] == [1.0, 0.5, 0.0, 0.0]
    assert math.isnan(rows.column("recall_vs_exact").to_pylist()[4])
    assert rows.column("coverage").to_pylist()[:4] == [1.0, 0.5, 0.5, 0.0]
    assert rows.column("k").to_pylist() == [4, 4, 2, 1, 0]


def test_report_by_hand(tmp_path: Path) -> None:
    report = recall_report(audit_rows(REQUESTS), day="2026-01-05", floor=0.6, home=tmp_path)
    assert report.overall.num_requests == 4
    assert report.overall.recall == pytest.approx(0.375)
    # users {1: 0.625 + 0.125, 2: -0.375, anonymous: -0.375}: sqrt(3 / 2 * (0.5625 + 0.140625 + 0.140625)) / 4
    assert report.overall.standard_error == pytest.approx(math.sqrt(1.5 * 0.84375) / 4)
    tiers = {s.slice: s for s in report.slices}
    assert tiers["tier=full"].recall == 0.75
    assert math.isnan(tiers["tier=full"].standard_error)
    assert tiers["tier=lite"].recall == 0.0
    assert report.breaches == ("tier=lite",)
    assert report.values["MeanValue(recall_vs_exact)"] == pytest.approx(0.375)
    assert report.values["QuantileValue(latency_ms, 0.5)"] == pytest.approx(2.5)
    assert report.html is not None
    assert report.html.name == "recall-2026-01-05.html"
    assert report.html.exists()


def test_nothing_to_report() -> None:
    with pytest.raises(ValueError, match="no audited request"):
        recall_report(audit_rows(REQUESTS[4:]), day="2026-01-05", floor=0.9)
