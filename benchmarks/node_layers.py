"""Single MoE layers and groups for `node_checks`: what the host reads, how exact they are, what they take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases import Case, Shape
from benchmarks.trainees import build
from ds_etp.config.block import ExpertTensorParallelConfig
from ds_etp.experts.build import make_shard
from ds_etp.experts.registry import read_layout
from ds_etp.experts.sharded import shard_in_place
from ds_etp.parallel import host
from ds_etp.parallel.process_groups import ExpertGroups
from ds_etp.parallel.topology import Topology
from ds_etp.patches.transformers.grouped_mm import sorted_forward

Interval = tuple[float, float]


def device_here() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def sync_debug_mode(mode: str | int) -> Iterator[None]:
    """What CUDA does where the host waits for it: `default` or `error`, of all threads. Without CUDA nothing."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def only_reads(mode: str) -> Iterator[list[int]]:
    """Notes the sizes of what `parallel.host.to_host` reads, which may wait; whatever else waits is up to `mode`."""
    original, reads = host.to_host, []

    def read(tensor: Tensor) -> host.Ints:
        reads.append(tensor.numel())
        with sync_debug_mode("default"):
            return original(tensor)

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("ds_etp.") and vars(module).get("to_host") is original
    ]
    for module in users:
        module.to_host = read  # type: ignore[attr-defined]
    try:
        with sync_debug_mode(mode):
            yield reads
    finally:
        for module in users:
            module.to_host = original  # type: ignore[attr-defined]


def sees_waits(device: torch.device) -> bool:
    """Whether a wait is an error in mode `error`, as this whole check relies on."""
    number = torch.ones((), device=device)
    try:
        with sync_debug_mode("error"):
            number.item()
    except RuntimeError:
        return True
    return False


def reads_of(block: Any, hidden: Tensor, mode: str) -> tuple[int, int]:
    """How often the host reads in a block's forward, and in its backward."""
    block.zero_grad()
    grad = torch.randn_like(hidden)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    with only_reads(mode) as reads:
        out = block(hidden)
        forward = len(reads)
        (out[0] if isinstance(out, tuple) else out).backward(grad)
    return forward, len(reads) - forward


@contextmanager
def expert_groups(case: Case) -> Iterator[ExpertGroups]:
    """The groups an engine would make."""
    from deepspeed.utils import groups as deepspeed_groups

    if case.tp > 1:
        deepspeed_groups._init_tp_mesh_device(tensor_model_parallel_size=case.tp)
    groups = ExpertGroups(Topology(case.world, tp=case.tp, ep=case.ep, etp=case.etp))
    try:
        yield groups
    finally:
        groups.destroy()


def whole_block(shape: Shape, device: torch.device, dtype: torch.dtype, implementation: str = "grouped_mm") -> Any:
    """The MoE block of a Mixtral, from a fixed seed."""
    model = build(replace(shape, layers=1))
    model.set_experts_implementation(implementation)
    return model.model.layers[0].mlp.to(device, dtype)


def shard(block: Any, groups: ExpertGroups, dispatcher: str, **options: Any) -> None:
    """Splits a block's experts as `deepspeed.initialize` does."""
    layout, config = read_layout("experts", block.experts), ExpertTensorParallelConfig(**options)
    shard_in_place(block.experts, make_shard("experts", block.experts, layout, groups, dispatcher, config, None, block))


@contextmanager
def sharded_block(shape: Shape, case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """A block whose experts are split over the ranks, without an engine around it."""
    block = whole_block(shape, device, dtype)
    with expert_groups(case) as groups:
        shard(block, groups, case.dispatcher)
        yield block


def routed(shape: Shape, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights, and the gradient of their outputs, in numbers that bf16 has."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(tokens, shape.hidden, generator=generator).bfloat16().float() for _ in range(2))
    index = torch.rand(tokens, shape.experts, generator=generator).argsort(1)[:, : shape.per_token]
    weights = torch.rand(tokens, shape.per_token, generator=generator).bfloat16().float()
    return x.to(device), index.to(device), weights.to(device), grad.to(device)


def run_experts(experts: Any, rows: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and token gradients."""
    x, index, weights, grad = rows
    x = x.to(dtype, copy=True).requires_grad_()
    out = experts(x, index, weights.to(dtype))
    out.backward(grad.to(dtype))
    return [out.detach().float(), x.grad.float()]  # type: ignore[union-attr]


def relative_error(got: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest of the mean errors, by the mean of what is right. Not a number where one isn't."""
    errors = [((one - other).abs().mean() / other.abs().mean()).item() for one, other in zip(got, right, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def bf16_errors(shape: Shape, case: Case, device: torch.device) -> tuple[float, float]:
    """Errors against fp32 of bf16 experts in one process, and of sharded ones that are added up in fp32."""
    rows = routed(shape, shape.tokens // case.dp, device, seed=dist.get_rank() // case.tp)
    # The same weights, in numbers that bf16 has.
    exact = whole_block(shape, device, torch.bfloat16, "eager").float()
    right = run_experts(exact.experts, rows, torch.float32)
    block = whole_block(shape, device, torch.bfloat16)
    own = relative_error(run_experts(deepcopy(block).experts, rows, torch.bfloat16), right)
    with expert_groups(case) as groups:
        shard(block, groups, case.dispatcher, reduce_dtype="fp32")
        return own, relative_error(run_experts(block.experts, rows, torch.bfloat16), right)


def sentinel_error(shape: Shape, device: torch.device) -> float:
    """The error of rows that come expert by expert, some experts without any, and sentinels behind them.

    Kernels write nothing for those: what the memory held, NaN here, must not come through.
    """
    block, experts = whole_block(shape, device, torch.bfloat16), shape.experts
    exact = whole_block(shape, device, torch.bfloat16, "eager").float().experts
    forward = sorted_forward(block.experts)
    assert forward is not None, "transformers' own grouped_mm is not what runs here"
    x, _, weights, grad = routed(shape, shape.tokens, device, seed=0)
    kept = len(x) * 3 // 4
    index = torch.arange(len(x), device=device) * (experts // 2) // kept * 2  # every other expert
    index[kept:] = experts
    rows = x, index[:, None], weights[:, :1], grad
    del_me = torch.full((64 * len(x), shape.hidden), torch.nan, device=device, dtype=torch.bfloat16)
    del del_me
    got = run_experts(lambda *arguments: forward(*arguments, True), rows, torch.bfloat16)
    right = run_experts(exact, tuple(part[:kept] for part in rows), torch.float32)  # type: ignore[arg-type]
    if any(part[kept:].abs().sum() != 0 for part in got):
        return float("nan")
    return relative_error([part[:kept] for part in got], right)


def memory_of_groups(case: Case, rounds: int) -> tuple[int, list[tuple[int, int]], int]:
    """MiB of the device in use: before; in each round with groups that have sent something, and after they went.

    Also how many groups there are.
    """
    message, count, used = torch.ones(1 << 20, device=device_here()), 0, []
    before = device_mib()
    for _ in range(rounds):
        with expert_groups(case) as groups:
            peers = [groups.expert_model_parallel, groups.expert_dp, groups.ep, groups.expt_tp]
            sent = {id(info.group): info.group for info in peers if info.size > 1}
            for group in sent.values():
                dist.all_reduce(message, group=group)  # NCCL makes a communicator with its first message
            count, made = len(sent), device_mib()
        used.append((made, device_mib()))
    return before, used, count


def device_mib() -> int:
    """What is in use of the device, by whomever, once all ranks are here."""
    dist.barrier()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals in order, those that touch as one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def shared_time(messages: Iterable[Interval], work: Iterable[Interval]) -> tuple[float, float]:
    """How long messages take, and for how long of it there is work too."""
    both, ours = merged(messages), merged(work)
    hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in both for c, d in ours)
    return sum(end - begin for begin, end in both), hidden


def hidden_share(engine: Any, ids: Tensor, trace: Path, passes: int = 3) -> tuple[float, float]:
    """The share of messages' time in which other kernels run, and the seconds of a forward and backward.

    Gradients are not reduced: the messages are the dispatchers'.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    def run() -> None:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(input_ids=ids, labels=ids).loss)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(passes):
        run()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / passes
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(passes):
            run()
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    kernels = [event for event in profiled.events() or [] if event.device_type == DeviceType.CUDA]
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in kernels]
    # Not the annotations around them, nccl:...; and copies are no work that messages hide behind.
    messages = [span for name, span in spans if name.startswith(("ncclDevKernel", "ncclKernel"))]
    work = [span for name, span in spans if "nccl" not in name.lower() and not name.startswith(("Mem", "mem"))]
    total, hidden = shared_time(messages, work)
    return (hidden / total if total else 0.0), seconds
