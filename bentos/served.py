"""A Bento served by a process of its own: started on a free loopback port, waited for, called, and ended for sure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bentos.build import bentoml_environment
from bentos.child import command

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServedAnswer:
    """What came back for one request."""

    status: int
    body: dict[str, Any]
    latency_ms: float


@contextlib.contextmanager
def serve(
    home: Path, target: str | Path, *, ready_timeout_s: float = 90.0, environment: Mapping[str, str] | None = None
) -> Iterator[ServedProcess]:
    """Serve a Bento (tag or folder) while the block runs; stops it cleanly, or by force when it does not stop.

    It gets a BentoML home of its own: a second server in one home deletes the metrics of the first.
    """
    port = free_port()
    arguments = command("bentoml", "serve", str(bento_path(home, target)), "--host", HOST, "--port", str(port))
    folder = Path(home).resolve() / "logs" / "service"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mirach-serve-") as own, (folder / f"serve-{port}.log").open("w") as output:
        variables = {
            **bentoml_environment(home), "MIRACH_HOME": str(Path(home).resolve()), "OMP_NUM_THREADS": "1",
            "BENTOML_HOME": own, **(environment or {}),
        }  # fmt: skip
        variables.pop("PROMETHEUS_MULTIPROC_DIR", None)
        process = subprocess.Popen(
            arguments, cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        served = ServedProcess(process, port, Path(output.name))
        try:
            served.wait_ready(ready_timeout_s)
            yield served
        finally:
            served.stop()


class ServedProcess:
    """A running `bentoml serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.ready_s = 0.0
        self.stop_s = 0.0
        self.exit_code = 0

    def call(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> ServedAnswer:
        """One HTTP call on a connection."""
        started = time.perf_counter()
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return ServedAnswer(response.status, _parse(text), (time.perf_counter() - started) * 1e3)

    def connect(self, timeout_s: float = 30.0) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for `/readyz`; raises RuntimeError with the end of the log when it ends or takes too long."""
        started = time.perf_counter()
        while (waited := time.perf_counter() - started) < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the service ended with {self.process.returncode}: {self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = self.connect(timeout_s=2.0)
                with contextlib.closing(connection):
                    if self.call(connection, "GET", "/readyz").status == 200:
                        self.ready_s = waited
                        return
            time.sleep(0.1)
        raise RuntimeError(f"the service was not ready after {timeout_s} s: {self.log_tail()}")

    def log_tail(self) -> str:
        """The end of what the service wrote."""
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self, patience_s: float = 20.0) -> None:
        """Terminate, wait, and kill the whole process group if that was not enough."""
        started = time.perf_counter()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.exit_code = self.process.wait()
        self.stop_s = time.perf_counter() - started


def send_all(served: ServedProcess, requests: Sequence[Mapping[str, Any]], concurrency: int) -> list[ServedAnswer]:
    """Send requests over `concurrency` connections; answers in the order of the requests."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(requests)):
        waiting.put(i)
    answers: dict[int, ServedAnswer] = {}

    def work() -> None:
        with contextlib.closing(served.connect()) as connection:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    answers[i] = served.call(connection, "POST", "/retrieve", dict(requests[i]))
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    answers[i] = ServedAnswer(0, {"error": repr(error)}, 0.0)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[i] for i in range(len(requests))]


def bento_path(home: Path, target: str | Path) -> Path:
    """Folder of a Bento given by folder or by tag (`retrieval:<version>`); raises ValueError when there is none."""
    path = Path(target)
    if not path.is_dir():
        name, _, version = str(target).partition(":")
        path = Path(home) / "bentoml" / "bentos" / name / version
    if not (path / "bento.yaml").exists():
        raise ValueError(f"{target}: there is no Bento at {path}")
    return path.resolve()


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        port: int = s.getsockname()[1]
        return port


def _parse(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {"text": text.decode(errors="replace")}
    return value if isinstance(value, dict) else {"value": value}
