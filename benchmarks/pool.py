"""Launches of many short cases: a process per environment has the libraries imported and forks the ranks.

A launch then costs a fork and not the seconds that importing torch, DeepSpeed and transformers takes, and every
launch still is a set of new processes. For CPUs: CUDA doesn't survive a fork, see `torchrun`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks import turns

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Launch:
    """What the ranks of one launch do: `module:function`, with JSON arguments and a `folder`."""

    world: int
    function: str
    arguments: dict[str, Any]


class LaunchFailed(RuntimeError):
    """A launch failed on some rank or ran out of time. The message holds the traceback."""


class Pool:
    """The process that forks the ranks of one environment."""

    def __init__(self, python: str, log: Path) -> None:
        # The environment's own folder, found without following links: a virtual environment's python is one.
        base = Path(python).absolute().parents[1]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{base / 'bin'}:{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
        }
        # Where DeepSpeed's collectives are compiled: per environment, as the Makefile does.
        own = Path(python).parents[1] != Path(sys.executable).parents[1]
        if own or "TORCH_EXTENSIONS_DIR" not in variables:
            variables["TORCH_EXTENSIONS_DIR"] = str(base / "torch_extensions")
        self._log = open(log, "w")  # noqa: SIM115 - for as long as the process lives
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables,
            cwd=ROOT,
        )

    def run(self, world: int, function: str, timeout: float = 180, **arguments: Any) -> list[Any]:
        """Calls `module:function` with JSON arguments and a `folder` on new processes, one for each rank.

        Raises:
            LaunchFailed: on any rank.
        """
        (results,) = self.together([Launch(world, function, arguments)], timeout)
        if isinstance(results, LaunchFailed):
            raise results
        return results

    def together(self, launches: Sequence[Launch], timeout: float | None = None) -> list[list[Any] | LaunchFailed]:
        """Runs launches side by side, one at a time: see `turns`. For each what its ranks return, or why it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"launches": [asdict(launch) for launch in launches], "timeout": timeout or 120 * len(launches)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise LaunchFailed(f"the pool died; its log is {self._log.name}")
        return [
            LaunchFailed("\n".join(answer["errors"])) if answer["errors"] else answer["results"]
            for answer in json.loads(line)
        ]

    def close(self) -> None:
        """Ends the process. Its ranks have ended with their launch."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def call(function: str, arguments: dict[str, Any]) -> Any:
    """Calls `module:function`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def _rank(rank: int, launch: Launch, folder: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update({name: str(launch.world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    turns.referee(pipe)
    try:
        import deepspeed
        import torch.distributed as dist

        deepspeed.init_distributed(
            dist_backend="gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=launch.world,
            auto_mpi_discovery=False,
            verbose=False,
        )
        result = call(launch.function, {**launch.arguments, "folder": folder})
        dist.barrier()
        pipe.send(("done", result))
    except BaseException:
        pipe.send(("failed", f"--- rank {rank} ---\n{traceback.format_exc()}"))
    sys.stderr.flush()
    os._exit(0)  # no destructors: peers may be gone


class _Running:
    """The processes of one launch."""

    def __init__(self, launch: Launch, folder: str, deadline: float) -> None:
        context = multiprocessing.get_context("fork")
        self.deadline = deadline
        self.processes, self.pipes = [], []
        self.waiting: set[int] = set()  # ranks, for a turn
        self.answers: dict[int, tuple[str, Any]] = {}
        for rank in range(launch.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, launch, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    @property
    def silent(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in range(len(self.pipes)) if rank not in self.answers]

    @property
    def over(self) -> bool:
        """Whether no answer is to come any more."""
        return not self.silent or time.monotonic() > self.deadline

    @property
    def idle(self) -> bool:
        """Whether all ranks wait for a turn."""
        return len(self.waiting) == len(self.pipes)

    def hear(self, rank: int) -> None:
        """Takes one message of a rank."""
        try:
            message = self.pipes[rank].recv()
        except (EOFError, ConnectionError):
            message = ("failed", f"rank {rank} died")
        if message[0] == "waits":
            self.waiting.add(rank)
            return
        self.answers[rank] = message
        if message[0] == "failed":
            self.deadline = min(self.deadline, time.monotonic() + 3)  # its peers wait for it in vain

    def go(self) -> None:
        """Gives all ranks their turn."""
        self.waiting.clear()
        for pipe in self.pipes:
            pipe.send("go")

    def result(self) -> dict[str, Any]:
        """What all ranks returned, or the errors of those that failed."""
        errors = [detail for status, detail in self.answers.values() if status == "failed"]
        if self.silent and not errors:
            errors = [f"ranks {self.silent} gave no answer in time"]
        return {"errors": errors, "results": [] if errors else [self.answers[i][1] for i in range(len(self.pipes))]}


def _launch(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the launches of an order. Those whose ranks all wait take turns, whenever no other is at work."""
    with ExitStack() as folders:
        deadline = time.monotonic() + order["timeout"]
        running = []
        for launch in order["launches"]:
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="ds_etp-bench-"))
            running.append(_Running(Launch(**launch), folder, deadline))
        last = -1
        while alive := [number for number, launch in enumerate(running) if not launch.over]:
            if all(running[number].idle for number in alive):
                last = next((number for number in alive if number > last), alive[0])
                running[last].go()
            heard = {running[number].pipes[rank]: (number, rank) for number in alive for rank in running[number].silent}
            patience = max(min(running[number].deadline for number in alive) - time.monotonic(), 0)
            for pipe in wait(list(heard), timeout=patience):
                number, rank = heard[pipe]  # type: ignore[index]
                running[number].hear(rank)
        for process in [process for launch in running for process in launch.processes]:
            process.kill()
            process.join()
        return [launch.result() for launch in running]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    import gc

    import deepspeed
    import torch
    import transformers
    from deepspeed.comm.torch import build_shm_op
    from transformers import MixtralForCausalLM  # noqa: F401 - in every fork then

    build_shm_op()  # compiled here, by one process, where it isn't yet: a killed rank would leave a lock behind

    importlib.import_module("benchmarks.timing")
    importlib.import_module("ds_etp.engine")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("WARNING")
    gc.freeze()  # half a million objects of the libraries, which every collection would walk
    for line in sys.stdin:
        answers.write(json.dumps(_launch(json.loads(line))) + "\n")


if __name__ == "__main__":
    _serve()
