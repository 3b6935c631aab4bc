"""How far a running stage has come: one changing line in a terminal, a line now and then in the run's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TERMINAL_EVERY_S = 0.2
LOG_EVERY_S = 10.0


@dataclass
class _Listener:
    tell: Callable[[str], None]
    every_s: float
    next_s: float


_listeners: list[_Listener] = []


@contextmanager
def listening(tell: Callable[[str], None], every_s: float) -> Iterator[None]:
    """Inside, `tell` hears what stages report, at most once in `every_s` seconds, and not before those have passed."""
    listener = _Listener(tell, every_s, time.monotonic() + every_s)
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(text: str) -> None:
    """Say what the stage is doing to those that have not heard anything for a while."""
    now = time.monotonic()
    for listener in _listeners:
        if now >= listener.next_s:
            listener.next_s = now + listener.every_s
            listener.tell(text)


def report_step(what: str, step: int, total: int, loss: float) -> None:
    """Say at which step of how many a training is, and its loss."""
    report(f"{what}: step {step:,} of {total:,}, loss {loss:.4f}")
