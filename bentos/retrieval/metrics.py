"""Prometheus metrics of the service: labelled by route template and status, with buckets from a millisecond.

`bentoml serve` sets PROMETHEUS_MULTIPROC_DIR, so counters live in files and survive a killed worker; without
it the same objects count in memory. The client decides when it is imported, whatever the variable says later
(importing Feast sets it).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bentos.retrieval.batcher import BatchReport
from bentos.retrieval.runtime import Answer

LATENCY_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
COST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
AGE_S = (60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 2 * 86400.0, 7 * 86400.0, 30 * 86400.0)
BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class ServiceMetrics:
    """All metrics of one service process, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "mirach_requests_total", "HTTP requests", ["route", "method", "status"], registry=r
        )  # fmt: skip
        self.latency = Histogram(
            "mirach_request_seconds", "Latency of HTTP requests", ["route"], buckets=LATENCY_S, registry=r
        )
        self.queue_wait = Histogram("mirach_queue_wait_seconds", "Wait for the slot", buckets=LATENCY_S, registry=r)
        self.compute = Histogram(
            "mirach_batch_seconds", "Features and search of a batch", ["tier"], buckets=LATENCY_S, registry=r
        )
        self.batch_size = Histogram("mirach_batch_size", "Requests per batch", ["tier"], buckets=BATCH, registry=r)
        self.answers = Counter("mirach_answers_total", "Retrievals answered", ["tier", "surface"], registry=r)
        self.stepped_down = Counter("mirach_stepped_down_total", "Answers of a cheaper tier under load", registry=r)
        self.empty = Counter("mirach_empty_answers_total", "Answers without any ad", registry=r)
        self.cold = Counter("mirach_cold_users_total", "Answers for unknown users", registry=r)
        self.cost = Histogram("mirach_cost_ratio", "Cost against a full scan", ["tier"], buckets=COST, registry=r)
        self.feature_age = Histogram("mirach_feature_age_seconds", "Age of features", buckets=AGE_S, registry=r)
        self.events = Counter("mirach_events_total", "Engagements pushed into user tails", registry=r)
        self.swaps = Counter("mirach_release_swaps_total", "Releases loaded", ["outcome"], registry=r)
        self.log_dropped = Counter("mirach_request_log_dropped_total", "Requests the log had no room for", registry=r)
        self.release = Gauge(
            "mirach_release_loaded_timestamp_seconds", "When the serving release was loaded",
            registry=r, multiprocess_mode="mostrecent",
        )  # fmt: skip

    def observe_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one HTTP request."""
        self.requests.labels(route, method, str(status)).inc()
        self.latency.labels(route).observe(seconds)

    def observe_batch(self, report: BatchReport) -> None:
        """Count one batch."""
        self.batch_size.labels(report.key).observe(report.size)
        self.compute.labels(report.key).observe(report.compute_s)
        for wait in report.queue_wait_s:
            self.queue_wait.observe(wait)

    def observe_answer(self, answer: Answer, surface: str, stepped_down: bool) -> None:
        """Count one retrieval."""
        self.answers.labels(answer.tier, surface).inc()
        self.cost.labels(answer.tier).observe(answer.cost)
        if stepped_down:
            self.stepped_down.inc()
        if not answer.ad_ids:
            self.empty.inc()
        if answer.cold:
            self.cold.inc()
        if answer.feature_age_s is not None:
            self.feature_age.observe(answer.feature_age_s)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its media type."""
        registry = self.registry
        if values.ValueClass is not values.MutexValue:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE_LATEST
