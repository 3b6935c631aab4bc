from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from bentos.retrieval.batcher import BatchReport, DeadlineExceededError, MicroBatcher, OverloadedError


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Slot:
    """Work that waits until it is released, and remembers its batches."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.batches: list[tuple[str, list[int]]] = []

    def run(self, key: str, items: Sequence[int]) -> list[int]:
        self.batches.append((key, list(items)))
        assert self.open.wait(5)
        return [item * 10 for item in items]


def test_requests_that_wait_are_answered_together(executor: ThreadPoolExecutor) -> None:
    slot, reports = Slot(), list[BatchReport]()

    async def scenario() -> list[int]:
        batcher = MicroBatcher(slot.run, executor, max_batch=3, on_batch=reports.append)
        waiting = [asyncio.create_task(batcher.submit("a", i, 5)) for i in range(5)]
        waiting.append(asyncio.create_task(batcher.submit("b", 9, 5)))
        await asyncio.sleep(0.05)
        slot.open.set()
        return await asyncio.gather(*waiting)

    assert asyncio.run(scenario()) == [0, 10, 20, 30, 40, 90]
    # The first starts at once; then the oldest key first, at most three together.
    assert slot.batches == [("a", [0]), ("a", [1, 2, 3]), ("a", [4]), ("b", [9])]
    assert [r.size for r in reports] == [1, 3, 1, 1]
    assert all(len(r.queue_wait_s) == r.size for r in reports)


def test_full_queue_refuses_at_once(executor: ThreadPoolExecutor) -> None:
    slot = Slot()

    async def scenario() -> OverloadedError:
        batcher = MicroBatcher(slot.run, executor, max_queue=2)
        waiting = [asyncio.create_task(batcher.submit("a", i, 5)) for i in range(3)]
        await asyncio.sleep(0.02)
        assert batcher.load == 1.0
        started = time.perf_counter()
        with pytest.raises(OverloadedError) as refused:
            await batcher.submit("a", 9, 5)
        assert time.perf_counter() - started < 0.05
        slot.open.set()
        assert await asyncio.gather(*waiting) == [0, 10, 20]
        return refused.value

    assert asyncio.run(scenario()).retry_after_s > 0


def test_deadline_holds_in_the_queue_and_in_the_slot(executor: ThreadPoolExecutor) -> None:
    slot = Slot()

    async def scenario() -> None:
        batcher = MicroBatcher(slot.run, executor)
        working = asyncio.create_task(batcher.submit("a", 1, 0.05))
        queued = asyncio.create_task(batcher.submit("a", 2, 0.05))
        patient = asyncio.create_task(batcher.submit("a", 3, 5))
        results = await asyncio.gather(working, queued, return_exceptions=True)
        assert [type(r) for r in results] == [DeadlineExceededError, DeadlineExceededError]
        slot.open.set()
        assert await patient == 30

    asyncio.run(scenario())
    assert slot.batches == [("a", [1]), ("a", [3])]  # the expired one is never computed


def test_an_error_fails_its_batch_only(executor: ThreadPoolExecutor) -> None:
    def run(_key: str, items: Sequence[int]) -> list[int]:
        if 1 in items:
            raise ZeroDivisionError("boom")
        return list(items)

    async def scenario() -> None:
        batcher = MicroBatcher(run, executor)
        with pytest.raises(ZeroDivisionError):
            await batcher.submit("a", 1, 5)
        assert await batcher.submit("a", 2, 5) == 2

    asyncio.run(scenario())


def test_close_answers_what_waits_and_refuses_the_rest(executor: ThreadPoolExecutor) -> None:
    slot = Slot()

    async def scenario() -> None:
        batcher = MicroBatcher(slot.run, executor)
        waiting = [asyncio.create_task(batcher.submit("a", i, 5)) for i in range(3)]
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await batcher.submit("a", 9, 5)
        slot.open.set()
        await closing
        assert [w.result() for w in waiting] == [0, 10, 20]

    asyncio.run(scenario())
