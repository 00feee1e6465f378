"""What one rank does in one launch of a case: train a few steps, and tell how long each took and what it sent."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import turns
from benchmarks.cases import Case, Shape
from benchmarks.recorder import Recording, record
from benchmarks.trainees import Trainee, batch, make_trainee


class Clock:
    """Seconds of work on a device: CUDA events there, the wall clock on a CPU.

    Attributes:
        processor: seconds of CPU time that this process, with all its threads, spent on the last work. Unlike the
            wall clock it hardly knows what else a machine does.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.processor = 0.0

    def seconds(self, work: Any) -> float:
        """How long `work()` takes once all ranks are here."""
        dist.barrier()
        if not self.cuda:
            start, before = time.perf_counter(), time.process_time()
            work()
            self.processor = time.process_time() - before
            return time.perf_counter() - start
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def timed(shape: dict[str, Any], case: dict[str, Any], folder: str, steps: int, warmup: int = 1) -> dict[str, Any]:
    """One launch: seconds of every step, forward and backward apart, and what a forward and backward sends.

    Each step is a turn.

    Args:
        shape, case: rows of `cases`, as dictionaries.
        folder: the launch's own.
        steps: how many are timed, after `warmup` ones.
    """
    model_shape, model_case = Shape(**shape), Case(**case)
    trainee = make_trainee(model_shape, model_case, folder)
    clock = Clock(trainee.device)
    passes, whole, processor = [], [], []
    for step in range(warmup + steps):
        turns.wait()
        ids = batch(model_shape, model_case, step, trainee.device)
        passes.append(clock.seconds(lambda ids=ids: trainee.forward_backward(ids)))
        processor.append(clock.processor)
        trainee.clear()
        whole.append(clock.seconds(lambda ids=ids: trainee.step(ids)))
    layers = sent_by_layers(trainee, batch(model_shape, model_case, 0, trainee.device))
    dispatcher = next((m.ds_etp_shard.dispatcher for m in trainee.model.modules() if hasattr(m, "ds_etp_shard")), None)
    return {
        "forward_backward": passes[warmup:],
        "step": whole[warmup:],
        "processor": processor[warmup:],
        "messages": [len(messages) for messages in layers],
        "bytes": [sum(message.bytes for message in messages) for messages in layers],
        "dispatcher": type(dispatcher).__name__ if dispatcher else "",
        "peak": torch.cuda.max_memory_allocated() if trainee.device.type == "cuda" else 0,
    }


def sent_by_layers(trainee: Trainee, ids: Tensor) -> list[list[Any]]:
    """The messages of each MoE block, forward and backward. Those of attention, and of gradients, are left out.

    On CUDA backward runs in a thread of its own, which the recorder does not see: forward only.
    """
    blocks = [layer.mlp for layer in trainee.model.model.layers]
    layers: list[list[Any]] = [[] for _ in blocks]
    marks: dict[int, int] = {}
    hooks: list[Any] = []

    def watch(number: int, block: Any, recording: Recording) -> None:
        def begin(*_: Any) -> None:
            marks[number] = len(recording.messages)

        def end(*_: Any) -> None:
            layers[number] += recording.messages[marks[number] :]

        hooks.append(block.register_forward_pre_hook(begin))
        hooks.append(block.register_forward_hook(end))
        hooks.append(block.register_full_backward_pre_hook(begin))
        hooks.append(block.register_full_backward_hook(end))

    with record() as recording:
        for number, block in enumerate(blocks):
            watch(number, block, recording)
        trainee.forward_backward(ids)
    for hook in hooks:
        hook.remove()
    return layers
