"""Real processes for multi-process cases: started once, reused, ended on a time-out with their stacks shown."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# A process that has the libraries imported forks the workers, so they start in well under a second.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])
# A rank that failed leaves its peers waiting in a collective; their own errors, if any, come soon after.
_GRACE = 5.0
# DeepSpeed never lets go of a ZeRO-3 engine, nor that of its process groups and their threads: a worker that has run
# many cases has a thousand of them. A new one costs a fork.
_CASES_PER_WORKER = 20
# DeepSpeed may have to compile its CPU collectives first, and a rank that is killed meanwhile leaves a lock that every
# later run waits for.
_FIRST_CASE = 300.0


class CaseFailed(AssertionError):
    """A case failed on some rank or ran out of time. The message holds every rank's traceback or log."""


class _Worker:
    def __init__(self, rank: int, log: Path) -> None:
        from tests import worker

        self.rank, self.log, self.cases = rank, log, 0
        self.pipe, child = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=worker.main, args=(rank, child, str(log)), daemon=True)
        self.process.start()
        child.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def last_output(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Launcher:
    """Runs a function on the first `world` of a pool of worker processes, over gloo."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ds_etp-tests-"))
        self._workers: dict[int, _Worker] = {}
        self._cases = itertools.count()

    def run(self, world: int, function: Callable[..., Any], timeout: float = 120, **kwargs: Any) -> list[Any]:
        """Calls `function(**kwargs)` on `world` ranks of one process group.

        Args:
            world: number of ranks.
            function: a module-level function; it and its arguments are pickled.
            timeout: seconds for the whole case, after which its processes are ended.

        Returns:
            What each rank returned, by rank.

        Raises:
            CaseFailed: with every failing rank's traceback, or the stacks of those that hung.
        """
        case = next(self._cases)
        timeout += _FIRST_CASE if case == 0 else 0.0
        store = self._folder / f"store-{case}"
        workers = [self._worker(rank) for rank in range(world)]
        for worker in workers:
            worker.pipe.send({"world": world, "store": str(store), "function": function, "kwargs": kwargs})
        answers = self._collect(workers, time.monotonic() + timeout)
        store.unlink(missing_ok=True)
        if len(answers) == world and all(status == "done" for status, _ in answers.values()):
            return [answers[rank][1] for rank in range(world)]
        raise CaseFailed(self._report(workers, answers, timeout))

    def close(self) -> None:
        """Ends every worker, and removes their logs."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is not None and worker.cases >= _CASES_PER_WORKER:
            worker.end()
            worker = None
        if worker is None or not worker.process.is_alive():
            worker = self._workers[rank] = _Worker(rank, self._folder / f"rank-{rank}.log")
        worker.cases += 1
        return worker

    @staticmethod
    def _collect(workers: list[_Worker], deadline: float) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        open_pipes: dict[Connection, _Worker] = {worker.pipe: worker for worker in workers}
        while open_pipes and time.monotonic() < deadline:
            for pipe in wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0)):
                worker = open_pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[worker.rank] = worker.pipe.recv()
                except (EOFError, ConnectionError):
                    answers[worker.rank] = ("died", f"exit code {worker.process.exitcode}")
                if answers[worker.rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _report(self, workers: list[_Worker], answers: dict[int, tuple[str, Any]], timeout: float) -> str:
        parts = []
        for worker in workers:
            status, detail = answers.get(worker.rank, ("hung", f"no answer (time limit {timeout} s)"))
            if status == "hung":
                os.kill(worker.process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
                time.sleep(0.2)
            if status in ("hung", "died"):
                detail = f"{detail}\n{worker.last_output()}"
            if status != "done":
                parts.append(f"--- rank {worker.rank} {status} ---\n{detail}")
        # Whatever state they are in, the next case doesn't inherit it.
        for worker in workers:
            worker.end()
            self._workers.pop(worker.rank, None)
        return "\n".join(parts)
