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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


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
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"world": world, "function": function, "timeout": timeout, "arguments": arguments}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise LaunchFailed(f"the pool died; its log is {self._log.name}")
        answer = json.loads(line)
        if answer["errors"]:
            raise LaunchFailed("\n".join(answer["errors"]))
        results: list[Any] = answer["results"]
        return results

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


def _rank(rank: int, order: dict[str, Any], folder: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update({name: str(order["world"]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    try:
        import deepspeed
        import torch.distributed as dist

        deepspeed.init_distributed(
            dist_backend="gloo",
            init_method=(Path(folder) / "store").as_uri(),
            rank=rank,
            world_size=order["world"],
            auto_mpi_discovery=False,
            verbose=False,
        )
        result = call(order["function"], {**order["arguments"], "folder": folder})
        dist.barrier()
        pipe.send(("done", result))
    except BaseException:
        pipe.send(("failed", f"--- rank {rank} ---\n{traceback.format_exc()}"))
    sys.stderr.flush()
    os._exit(0)  # no destructors: peers may be gone


def _launch(order: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ds_etp-bench-") as folder:
        ranks = []
        for rank in range(order["world"]):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, order, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + order["timeout"]
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(deadline - time.monotonic(), 0)):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = ("failed", f"rank {rank} died")
                if answers[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + 3)  # its peers wait for it in vain
        for process, _ in ranks:
            process.kill()
            process.join()
    errors = [detail for status, detail in answers.values() if status == "failed"]
    if waiting and not errors:
        errors = [f"ranks {sorted(waiting.values())} gave no answer in {order['timeout']} s"]
    return {"errors": errors, "results": [] if errors else [answers[rank][1] for rank in range(order["world"])]}


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
    importlib.import_module("ds_etp.extension")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("WARNING")
    gc.freeze()  # half a million objects of the libraries, which every collection would walk
    for line in sys.stdin:
        answers.write(json.dumps(_launch(json.loads(line))) + "\n")


if __name__ == "__main__":
    _serve()
