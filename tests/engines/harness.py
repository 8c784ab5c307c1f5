"""A device under test: a real fork server process and the agent's end of its engines' sockets."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

import kvcached
from kvcached.weights.store import default_store
from prism.config.resolved import write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.engine import (
    Activated,
    ActivateEngine,
    ActivationFailed,
    EngineHello,
    EngineStatus,
    FromEngine,
    Shutdown,
    ToEngine,
)
from prism.messages.forking import (
    EngineExited,
    EngineForked,
    ForkEngine,
    ForkServerReady,
    FromForkServer,
)
from prism.messages.model_spec import ModelSpec
from prism.messages.requests import Chunk, EngineOutput, Failure, Request, Sampling
from tests.engines.preloaded import Preloaded

DEVICE = "host:0"
FORK_SERVER = ("-m", "prism.engines.processes.forkserver")
T = TypeVar("T")


def request(
    request_id: str, model: str, prompt_ids: list[int], max_tokens: int = 16, **sampling: Any
) -> Request:
    """Makes a greedy request that no end-of-sequence token stops."""
    settings = {"temperature": 0.0, "ignore_eos": True} | sampling
    return Request(
        id=request_id,
        model=model,
        prompt_ids=prompt_ids,
        sampling=Sampling(max_tokens=max_tokens, **settings),
        arrival_unix_s=time.time(),
        slo_ttft_s=10.0,
        slo_tpot_s=1.0,
        frontend_id="f0",
    )


@dataclass
class Stream:
    """All chunks and failures of one request."""

    chunks: list[Chunk] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def token_ids(self) -> list[int]:
        """Asserts that the positions are contiguous."""
        tokens: list[int] = []
        for chunk in self.chunks:
            assert chunk.first_index == len(tokens)
            tokens += chunk.token_ids
        return tokens

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.finish_reason is not None


class ForkServerProcess:
    """The fork server as the agent runs it: JSON lines in and out, stderr in a file."""

    def __init__(
        self,
        adapter: str,
        config: ClusterConfig,
        environment: dict[str, str],
        device: str = DEVICE,
        program: Sequence[str] = FORK_SERVER,
    ) -> None:
        run_dir = Path(config.run_dir)
        write_resolved(config, run_dir / "cluster.json")
        self.log_path = run_dir / "forkserver.log"
        arguments = ["--adapter", adapter, "--config", str(run_dir / "cluster.json")]
        arguments += ["--device", device]
        env = {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | Preloaded
        with self.log_path.open("wb") as log:
            if adapter == "sglang" and device.startswith("host") and program == FORK_SERVER:
                self.process = Preloaded(arguments, env, log)
            else:
                python = config.engine.python.get(adapter, sys.executable)
                command = [python, "-P", *program, *arguments]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self.process = subprocess.Popen(command, env=env, bufsize=0, **pipes)
        self._lines = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)

    @property
    def _stdout(self) -> Any:
        assert self.process.stdout is not None
        return self.process.stdout

    def write_line(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def read(self, timeout_s: float = 60.0) -> FromForkServer | None:
        """Returns the next message; None at the end of the output."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            left_s = deadline_s - time.monotonic()
            assert self._selector.select(max(0.0, left_s)), self.log_path.read_text()
            data = os.read(self._stdout.fileno(), 65536)
            if not data:
                return None
            self._lines += data
        line, self._lines = self._lines.split(b"\n", 1)
        return msgspec.json.decode(line, type=FromForkServer)

    def expect(self, kind: type[T], timeout_s: float = 60.0) -> T:
        message = self.read(timeout_s)
        assert isinstance(message, kind), (message, self.log_path.read_text())
        return message

    def close(self) -> None:
        """Closes the input and waits; kills the process and raises if it does not end."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._stdout.close()
            self._selector.close()


class DeviceUnderTest:
    """Talks to engines as the agent does, and owns the device's ledger as the agent does."""

    def __init__(
        self,
        adapter: str,
        config: ClusterConfig,
        environment: dict[str, str],
        device: str = DEVICE,
        program: Sequence[str] = FORK_SERVER,
    ) -> None:
        self.config = config
        place = config.device(device)
        self.memory = kvcached.Device.open(
            device,
            capacity_bytes=place.capacity_bytes,
            page_bytes=place.page_bytes,
            namespace=config.namespace,
        )
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.bind(config.agent_engines_endpoint(device))
        self.fork_server = ForkServerProcess(adapter, config, environment, device, program)
        self.ready = self.fork_server.expect(ForkServerReady, 180.0)
        self.pids: dict[str, int] = {}
        self.streams: dict[str, Stream] = {}
        self.statuses: list[EngineStatus] = []
        self._inbox: list[tuple[str, FromEngine]] = []

    def fork(self, engine_id: str = "e0", peers: tuple[str, ...] = ()) -> EngineHello:
        order = ForkEngine(engine_id=engine_id, peers=peers)
        self.fork_server.write_line(msgspec.json.encode(order))
        forked = self.fork_server.expect(EngineForked)
        self.pids[engine_id] = forked.pid
        hello = self.wait_for(EngineHello, engine_id)
        assert hello == EngineHello(engine_id=engine_id, pid=forked.pid)
        return hello

    def client_usage(self, engine_id: str = "e0") -> kvcached.ClientUsage | None:
        """Returns the engine's record in the ledger."""
        found = [c for c in self.memory.usage().clients if c.name == engine_id]
        return found[0] if found else None

    def end(self, engine_id: str = "e0") -> None:
        """Shuts an engine down and checks that no record of it remains in the ledger."""
        self.send(Shutdown(), engine_id)
        assert self.exited(engine_id).status == 0, self._logs()
        assert self.client_usage(engine_id) is None

    def send(self, message: ToEngine, engine_id: str = "e0") -> None:
        self.send_raw([msgspec.msgpack.encode(message)], engine_id)

    def send_raw(self, frames: list[bytes], engine_id: str = "e0") -> None:
        self._router.send_multipart([engine_id.encode(), *frames])

    def activate(self, model: ModelSpec, engine_id: str = "e0", **options: Any) -> Activated:
        self.send(ActivateEngine(model=model, **options), engine_id)
        answer = self.wait_for((Activated, ActivationFailed), engine_id)
        assert isinstance(answer, Activated), answer
        return answer

    def trim(self, engine_id: str = "e0", target_bytes: int | None = None) -> kvcached.ShrinkAnswer:
        """Makes the engine give memory back, as any process of the machine can."""
        (answer,) = self.memory.shrink(engine_id, target_bytes, wait_s=60.0)
        assert answer.outcome == "answered", self._logs()
        return answer

    def wait_for(
        self, kind: type[T] | tuple[type[T], ...], engine_id: str = "e0", timeout_s: float = 60.0
    ) -> T:
        """Returns the next message of this kind from this engine; keeps or records the others."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for i, (sender, message) in enumerate(self._inbox):
                if sender == engine_id and isinstance(message, kind):
                    del self._inbox[i]
                    return message
            self._receive(deadline_s, str(kind))

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Receives messages until `condition` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self._receive(deadline_s, "condition")

    def finish(self, *request_ids: str, timeout_s: float = 120.0) -> list[Stream]:
        """Waits until these requests ended; returns their streams."""
        self.wait_until(lambda: all(self.stream(i).ended for i in request_ids), timeout_s)
        return [self.stream(i) for i in request_ids]

    def finish_one(self, open_ids: set[str], timeout_s: float = 240.0) -> None:
        """Waits until any of these requests ended; removes all that have."""
        self.wait_until(lambda: any(self.stream(i).ended for i in open_ids), timeout_s)
        open_ids -= {i for i in open_ids if self.stream(i).ended}

    def fresh_status(self, engine_id: str = "e0") -> EngineStatus:
        """Waits for the engine's next status."""
        count = len(self.statuses)
        self.wait_until(
            lambda: any(s.engine_id == engine_id for s in self.statuses[count:]), timeout_s=20.0
        )
        return next(s for s in self.statuses[count:] if s.engine_id == engine_id)

    def settled_status(
        self, condition: Callable[[EngineStatus], object], engine_id: str = "e0"
    ) -> EngineStatus:
        """Waits for a status that satisfies `condition`."""
        while not condition(status := self.fresh_status(engine_id)):
            pass
        return status

    def stream(self, request_id: str) -> Stream:
        return self.streams.setdefault(request_id, Stream())

    def exited(self, engine_id: str = "e0") -> EngineExited:
        exited = self.fork_server.expect(EngineExited, 30.0)
        assert (exited.engine_id, exited.pid) == (engine_id, self.pids.pop(engine_id))
        return exited

    def engine_log(self, engine_id: str = "e0") -> str:
        return (Path(self.config.run_dir) / "logs" / f"{engine_id}.log").read_text()

    def close(self) -> None:
        self._router.close()
        self._context.term()
        self.fork_server.close()
        self.memory.destroy(force=True)
        for folder in (self.config.moves_dir, default_store(self.config.namespace)):
            shutil.rmtree(folder, ignore_errors=True)

    def _receive(self, deadline_s: float, wanted: str) -> None:
        left_ms = 1000 * (deadline_s - time.monotonic())
        assert self._router.poll(max(1, left_ms)), f"no {wanted}: {self._logs()}"
        sender, payload = self._router.recv_multipart()
        message: FromEngine = msgspec.msgpack.decode(payload, type=FromEngine)
        match message:
            case EngineStatus():
                self.statuses.append(message)
            case EngineOutput():
                self._record(message)
            case _:
                self._inbox.append((sender.decode(), message))

    def _record(self, output: EngineOutput) -> None:
        for chunk in output.chunks:
            assert not self.stream(chunk.request_id).ended
            self.stream(chunk.request_id).chunks.append(chunk)
        for failure in output.failures:
            assert not self.stream(failure.request_id).ended
            self.stream(failure.request_id).failure = failure

    def _logs(self) -> str:
        paths = [self.fork_server.log_path, *sorted(Path(self.config.run_dir).glob("logs/*"))]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in paths if p.exists())
