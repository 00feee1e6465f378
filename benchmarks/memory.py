"""Peak memory of a rank's tensors while it trains, beside the sum of what it has to hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import Case, Shape
from benchmarks.trainees import BUCKET, EngineTrainee, Trainee, batch, make_trainee

_MARK = "benchmarks: steps begin"
_STEPS = 2  # the peak is in the second, when the optimizer has its moments


def measured(shape: dict[str, Any], case: dict[str, Any], folder: str) -> dict[str, Any]:
    """One launch: bytes at the peak of two steps, and the parts they should be made of.

    On a CPU, bytes are those of torch's allocator as its profiler sees them: exact, and without what the
    process holds besides. On CUDA they are `max_memory_allocated`.
    """
    model_shape, model_case = Shape(**shape), Case(**case)
    if torch.cuda.is_available():
        trainee = make_trainee(model_shape, model_case, folder)
        torch.cuda.reset_peak_memory_stats()
        _train(trainee, model_shape, model_case)
        peak = torch.cuda.max_memory_allocated()
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainee = make_trainee(model_shape, model_case, folder)
            with record_function(_MARK):
                pass
            _train(trainee, model_shape, model_case)
        peak = _peak(profiler)
    # Of the step with the peak: experts get as many rows as its batch has for them.
    return {"peak": peak, **_parts(trainee, batch(model_shape, model_case, _STEPS - 1, trainee.device))}


def _train(trainee: Trainee, shape: Shape, case: Case) -> None:
    for step in range(_STEPS):
        trainee.step(batch(shape, case, step, trainee.device))


def _peak(profiler: Any) -> int:
    """The most bytes alive at once after the mark."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive = peak = 0
    begun = False
    for event in events:
        begun = begun or event.name() == _MARK
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive) if begun else alive
    return peak


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _bytes(tensors: Any) -> int:
    """Of distinct tensors: two views of one storage count with what they show, not with all of it."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(_local, tensors))


def _parts(trainee: Trainee, ids: Tensor) -> dict[str, int]:
    named = dict(trainee.model.named_parameters())
    parameters = {_local(p).untyped_storage().data_ptr() for p in named.values()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainee.forward_backward(ids)
    trainee.clear()
    return {
        "parameters": _bytes(named.values()),
        "experts": _bytes(p for name, p in named.items() if ".experts." in name),
        "gradients": _bytes(p for p in named.values() if p.requires_grad),
        "optimizer": _bytes(trainee.optimizer_tensors()),
        "bucket": 4 * BUCKET if isinstance(trainee, EngineTrainee) else 0,
        "activations": sum(saved.values()),
    }
