"""The recipe of an oracle run, trained by a real DeepSpeed engine with ds_etp, gathered back to full tensors.

Everything here runs in worker processes.
"""

from __future__ import annotations

import gc
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

import ds_etp
from ds_etp.experts.layout import ParameterLayout
from ds_etp.experts.sharded import LocalShards, sharded_modules
from ds_etp.parallel.topology import Topology
from tests.oracle import Recipe, Run


@dataclass(frozen=True)
class Layout:
    """How a run is split.

    Attributes:
        world, tp, etp, ep: sizes.
        sp: ranks that share each sequence (Ulysses).
        stage: ZeRO stage.
        zero_init: builds the model under `zero.Init`.
        dispatcher: the block's dispatcher.
        with_block: whether the config has our block; without, the run is plain DeepSpeed.
        extra: entries that are merged over the DeepSpeed config, one level deep.
    """

    world: int
    tp: int = 1
    etp: int = 1
    ep: int = 1
    stage: int = 1
    dtype: str = "fp32"
    zero_init: bool = False
    dispatcher: str = "auto"
    with_block: bool = True
    extra: tuple[tuple[str, Any], ...] = field(default=())
    sp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense path."""
        return self.world // (self.tp * self.sp)

    def share(self, batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
        """What a rank gets of a batch `[rows, length, ...]`: all, or its run of positions."""
        if self.sp == 1:
            return batch
        part = rank // self.tp % self.sp
        return {name: value.chunk(self.sp, 1)[part].contiguous() for name, value in batch.items()}


def with_options(layout: Layout, **options: Any) -> Layout:
    """A layout with more keys in the config block."""
    return replace(layout, extra=(("expert_tensor_parallel", options),))


def ds_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """The DeepSpeed config of a run."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.rows,
        "gradient_accumulation_steps": recipe.accumulate,
        "gradient_clipping": recipe.clip,
        "optimizer": recipe.optimizer_config(),
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if layout.with_block:
        config["expert_tensor_parallel"] = {
            "etp_size": layout.etp,
            "ep_size": layout.ep,
            "dispatcher": layout.dispatcher,
        }
    if layout.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    for key, value in layout.extra:
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def make_engine(recipe: Recipe, layout: Layout, **arguments: Any) -> Any:
    """An engine with the recipe's model, ds_etp registered."""
    ds_etp.register()
    config = ds_config(recipe, layout)
    model = built_partitioned(recipe, config) if layout.zero_init else recipe.model()
    model.train()
    if "optimizer" not in arguments:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        arguments.setdefault("model_parameters", parameters)
    engine, *_ = deepspeed.initialize(model=model, config=config, **arguments)
    return engine


def built_partitioned(recipe: Recipe, config: dict[str, Any]) -> Any:
    """The recipe's model, built under `zero.Init`, with the weights it has when built normally."""
    # First, for its import too: a class that is defined inside zero.Init loses its decorators on the way out.
    values = dict(recipe.model().named_parameters())
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = recipe.model()
    for name, parameter in model.named_parameters():
        # transformers initializes weights after zero.Init has taken them apart, so they hold nothing yet.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(values[name].data)
    values.clear()
    gc.collect()
    return model


def train(recipe: Recipe, layout: Layout) -> Run | None:
    """Trains the recipe on this process's rank. Rank 0 returns the run, in full tensors."""
    engine = make_engine(recipe, layout)
    run = run_steps(engine, recipe, layout)
    engine.destroy()
    return run if dist.get_rank() == 0 else None


def run_steps(engine: Any, recipe: Recipe, layout: Layout, first: int = 0) -> Run:
    """Trains an engine for the recipe's steps, from the first on, and gathers what it did."""
    run = Run()
    data_rank = dist.get_rank() // (layout.tp * layout.sp)
    device = engine.device
    for step in range(first, recipe.steps):
        total = torch.zeros((), device=device)
        for micro in range(recipe.accumulate):
            batch = layout.share(recipe.batch(step, micro, data_rank), dist.get_rank())
            batch = {name: value.to(device) for name, value in batch.items()}
            recipe.seed_noise(step, micro, data_rank)
            loss = recipe.compute_loss(engine, batch, run.routers)
            engine.backward(loss)
            total += loss.detach() / recipe.accumulate
            if micro == recipe.accumulate - 1 and step == recipe.steps - 1:
                run.grads = full_tensors(engine, gradient)
            engine.step()
        # Tensor-parallel and sequence peers have the same loss, so the mean over the world is that over dp.
        dist.all_reduce(total)
        run.losses.append(total.item() / layout.world)
        norm = engine.get_global_grad_norm()
        run.norms.append(float("nan") if norm is None else float(norm))  # None: plain DeepSpeed at stage 0
    run.weights = full_tensors(engine, weight)
    return run


def _has_master(parameter: nn.Parameter) -> bool:
    if not parameter.requires_grad and not hasattr(parameter, "ds_id"):
        return False
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's reduced gradient, before clipping, gathered over its ZeRO group."""
    if not parameter.requires_grad:
        return torch.zeros(getattr(parameter, "ds_shape", parameter.shape))
    grad = safe_get_full_grad(parameter) if _has_master(parameter) else parameter.grad
    return torch.zeros(getattr(parameter, "ds_shape", parameter.shape)) if grad is None else grad


def weight(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter's master weight, gathered over its ZeRO group."""
    if not parameter.requires_grad and hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters(LocalShards([parameter])):
            return parameter.data.clone()
    full: Tensor = safe_get_full_fp32_param(parameter) if _has_master(parameter) else parameter.data
    return full


def expert_layouts(model: nn.Module) -> dict[str, ParameterLayout]:
    """How each parameter of the sharded experts is cut, by its name in the model."""
    return {
        f"{path}.{name}": module.ds_etp_shard.layout.parameters[name]
        for path, module in sharded_modules(model)
        for name, _ in module.named_parameters()
    }


def full_tensors(engine: Any, read: Any) -> dict[str, Tensor]:
    """Every parameter's `read` tensor under its Hugging Face name, gathered over tp, etp and ep.

    Asserts on the way that replicas are bit-identical: experts over expert_dp, the rest over everything
    that doesn't split it.
    """
    world = dist.get_world_size()
    topology = engine.ds_etp.topology if "ds_etp" in vars(engine) else Topology(world)
    experts = expert_layouts(engine.module)
    # As arrays: a tensor takes a dozen times as long to pickle.
    own = {
        name: read(parameter).detach().float().cpu().contiguous().numpy()
        for name, parameter in engine.module.named_parameters()
    }
    by_rank: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(by_rank, own)
    full = {}
    for name, parameter in engine.module.named_parameters():
        parts = [torch.from_numpy(arrays[name]) for arrays in by_rank]
        if name in experts:
            _assert_identical(name, parts, topology.groups("expert_dp"))
            block = topology.groups("expert_model_parallel")[0]
            shards = [[parts[rank] for rank in block[i : i + topology.etp]] for i in range(0, len(block), topology.etp)]
            full[name] = experts[name].unshard(shards)
            continue
        meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
        dim = (meta or {}).get("partition_dim")
        if dim is None:
            _assert_identical(name, parts, [tuple(range(world))])
            full[name] = parts[0]
        else:
            _assert_identical(name, parts, topology.groups("dp"))
            full[name] = torch.cat([parts[rank] for rank in topology.groups("tp")[0]], dim)
    return full


def _assert_identical(name: str, parts: list[Tensor], groups: Any) -> None:
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]
    for group in groups:
        assert len({digests[rank] for rank in group}) == 1, f"{name} differs between the replicas {group}"
