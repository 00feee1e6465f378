"""One worker process: imports the heavy libraries once, then runs a case after another."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import groups

import ds_etp
import ds_etp.engine

# Longer than the parent waits for a case: the parent ends a case that hangs, and shows where it hung.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def main(rank: int, pipe: Connection, log: str) -> None:
    """Runs cases from `pipe` until it closes. Output goes to the file `log`."""
    stream = open(log, "w", buffering=1)  # noqa: SIM115 - for as long as the process lives
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    torch.set_num_threads(1)
    # DeepSpeed's ZeRO-3 writes out every parameter for a message that it then doesn't print.
    torch.set_printoptions(threshold=0, edgeitems=1)
    transformers.logging.set_verbosity_error()
    gc.freeze()  # half a million objects of the libraries, which every collection would walk
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(rank, **case))


def _run(rank: int, world: int, store: str, function: Any, kwargs: dict[str, Any]) -> tuple[str, Any]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        deepspeed.init_distributed(
            dist_backend="gloo",
            init_method=Path(store).as_uri(),
            rank=rank,
            world_size=world,
            timeout=_COLLECTIVE_TIMEOUT,
            auto_mpi_discovery=False,
            verbose=False,
        )
        result = function(**kwargs)
        dist.barrier()
        return "done", result
    except BaseException:
        return "failed", traceback.format_exc()
    finally:
        ds_etp.unregister()
        _reset()


def _reset() -> None:
    """DeepSpeed keeps its groups and its ZeRO-3 parameter counters in modules: a new case starts without."""
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None
    for name, value in vars(groups).items():
        if isinstance(value, dict) and name.isupper() and "GROUP" in name:
            value.clear()
        elif name.isupper() and ("GROUP" in name or name.startswith("_MPU")):
            setattr(groups, name, None)
    groups.mpu = groups.mesh_device = None
    groups.expert_tensor_parallel_world_size = 1
    deepspeed.zero.partition_parameters.Init.num_persisted_elements = 0
    deepspeed.zero.partition_parameters.Init.num_persisted_parameters = 0
    deepspeed.zero.partition_parameters.Init.param_id = 0
    # ZeRO-3 replaces it for good, and with it the order in which weights and biases get their gradients. ZeRO-2 adds up
    # gradients in that order, so ranks that sat out the earlier case would add other ones.
    torch.nn.functional.linear = getattr(deepspeed.zero.Init, "linear_bk", torch.nn.functional.linear)
    # A counter in a default argument. Ranks that sat out a smaller case would disagree with the others.
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    gc.collect()
    gc.freeze()  # DeepSpeed never lets go of a ZeRO-3 engine: what is left would be walked in every collection to come
