"""A micro-batcher: requests that arrive while the compute slot is busy are answered together.

One event loop, one compute thread, no locks. A batch starts as soon as the slot is free (waiting for more
requests bought no throughput over HTTP); the queue is bounded, and a request that is not answered by its
deadline fails at the deadline, whatever the compute thread does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class OverloadedError(Exception):
    """The queue is full; `retry_after_s` is when it should have drained."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the queue is full; retry in {retry_after_s:.2f} s")
        self.retry_after_s = retry_after_s


class DeadlineExceededError(Exception):
    """The deadline passed before the answer was ready."""


@dataclass
class _Waiting(Generic[T, R]):
    item: T
    future: asyncio.Future[R]
    since: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class BatchReport:
    """What a finished batch was like, for metrics."""

    key: str
    size: int
    queue_wait_s: tuple[float, ...]
    compute_s: float


class MicroBatcher(Generic[T, R]):
    """Groups items by key (a tier) and runs `run(key, items)` in `executor`, one batch at a time."""

    def __init__(
        self,
        run: Callable[[str, Sequence[T]], Sequence[R]],
        executor: Executor,
        *,
        max_batch: int = 32,
        max_queue: int = 256,
        on_batch: Callable[[BatchReport], None] | None = None,
    ) -> None:
        self._run = run
        self._executor = executor
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._on_batch = on_batch
        self._queues: dict[str, deque[_Waiting[T, R]]] = {}
        self._busy = False
        self._closed = False
        self._batch_s = 0.01
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def queued(self) -> int:
        """Items that wait for the slot."""
        return sum(len(q) for q in self._queues.values())

    @property
    def load(self) -> float:
        """Share of the queue that is in use, 0..1."""
        return self.queued / self._max_queue

    def check_capacity(self) -> None:
        """Raise OverloadedError when one more item would not fit."""
        if self._closed:
            raise OverloadedError(1.0)
        if self.queued >= self._max_queue:
            raise OverloadedError(self._batch_s * (1 + self.queued / self._max_batch))

    async def submit(self, key: str, item: T, timeout_s: float) -> R:
        """Wait for the answer to one item.

        Raises:
            OverloadedError: the queue is full or the batcher is closing.
            DeadlineExceededError: no answer within `timeout_s` seconds.
        """
        self.check_capacity()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, future)
        future.add_done_callback(lambda _: timer.cancel())
        self._queues.setdefault(key, deque()).append(_Waiting(item, future))
        self._dispatch()
        return await future

    def _dispatch(self) -> None:
        if self._busy:
            return
        for queue in self._queues.values():
            while queue and queue[0].future.done():
                queue.popleft()
        waiting = {key: queue[0].since for key, queue in self._queues.items() if queue}
        if not waiting:
            return
        key = min(waiting, key=lambda k: waiting[k])
        batch: list[_Waiting[T, R]] = []
        queue = self._queues[key]
        while queue and len(batch) < self._max_batch:
            head = queue.popleft()
            if not head.future.done():
                batch.append(head)
        self._busy = True
        task = asyncio.get_running_loop().create_task(self._work(key, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, key: str, batch: list[_Waiting[T, R]]) -> None:
        started = time.perf_counter()
        try:
            items = [w.item for w in batch]
            results = await asyncio.get_running_loop().run_in_executor(self._executor, self._run, key, items)
            assert len(results) == len(batch)
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.future.done():
                    waiting.future.set_result(result)
        except Exception as error:
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
        finally:
            self._busy = False
            seconds = time.perf_counter() - started
            self._batch_s += 0.1 * (seconds - self._batch_s)
            if self._on_batch is not None:
                waits = tuple(started - w.since for w in batch)
                self._on_batch(BatchReport(key, len(batch), waits, seconds))
            self._dispatch()

    async def close(self) -> None:
        """Take no more items and wait until those that are queued have been answered or have expired."""
        self._closed = True
        while self._busy or any(self._queues.values()):
            self._dispatch()
            await asyncio.sleep(0.005)


def _expire(future: asyncio.Future[R]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceededError())
