"""Launches by torchrun: for GPUs, where processes can't be forks of one that has the libraries imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pool import ROOT, Launch, LaunchFailed, call


def run(world: int, function: str, timeout: float = 600, python: str = sys.executable, **arguments: Any) -> list[Any]:
    """Calls `module:function` with JSON arguments and a `folder` on `world` processes that torchrun starts.

    Raises:
        LaunchFailed: on any rank, or out of time.
    """
    with tempfile.TemporaryDirectory(prefix="ds_etp-bench-") as folder:
        order = json.dumps({"function": function, "arguments": arguments, "folder": folder})
        command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
        command += ["-m", "benchmarks.torchrun", order]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        variables.setdefault("OMP_NUM_THREADS", "1")
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=ROOT)
            try:
                code: int | str = process.wait(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                process.wait()
                code = f"out of {timeout} s"
            log.seek(0)
            tail = "".join(log.readlines()[-40:])
        if code != 0:
            raise LaunchFailed(f"{tail}\ntorchrun: {code}")
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(world)]


def together(launches: Sequence[Launch], python: str = sys.executable) -> list[list[Any] | LaunchFailed]:
    """Runs launches one after the other, as a GPU has room for one. For each its results, or why it failed."""
    results: list[list[Any] | LaunchFailed] = []
    for launch in launches:
        try:
            results.append(run(launch.world, launch.function, python=python, **launch.arguments))
        except LaunchFailed as error:
            results.append(error)
    return results


def _rank(order: dict[str, Any]) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    import transformers

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    transformers.logging.set_verbosity_error()
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)
    result = call(order["function"], {**order["arguments"], "folder": order["folder"]})
    path = Path(order["folder"]) / f"rank-{dist.get_rank()}.json"
    path.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
