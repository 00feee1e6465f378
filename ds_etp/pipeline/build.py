"""`from_causal_lm`: a Hugging Face causal language model as a DeepSpeed pipeline."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_etp.errors import ConfigError, config_error
from ds_etp.loading.deferred import deferred_modules
from ds_etp.patches.transformers.router_outputs import router_modules
from ds_etp.pipeline.batches import CausalLoss, check_names
from ds_etp.pipeline.check import check_pipe_layers
from ds_etp.pipeline.layerless import LayerlessModel
from ds_etp.pipeline.layers import (
    DecoderPipeLayer,
    DecoderStep,
    EmbedStep,
    HeadStep,
    NormStep,
    PipeLayer,
    PipeLayerSpec,
    TiedPipeLayerSpec,
)
from ds_etp.pipeline.router_loss import RouterLoss
from ds_etp.pipeline.structure import Structure, find_structure, refusal

Spec = PipeLayerSpec | TiedPipeLayerSpec


def from_causal_lm(
    model: Any,
    num_stages: int | None = None,
    *,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"),
    topology: Any = None,
    partition_method: str = "parameters",
    activation_checkpoint_interval: int = 0,
    dynamic_shape: bool = True,
    **options: Any,
) -> PipelineModule:
    """A DeepSpeed `PipelineModule` of a causal language model of transformers, for `deepspeed.initialize`.

    Its embedding, decoder layers, norm and head are found by their structure. How a layer is called (masks, sliding
    windows, positions, rotary embeddings) each stage learns from the family's own forward, run without layers. Before
    anything is changed, the pipeline's layers are compared with the model's own forward on a small batch, to the bit.

    The layers hold the model's own modules. Each rank keeps those of its pipeline stage and lets go of all others, so
    `model` is taken apart: don't use it afterwards. Every rank calls this with the same weights, on the CPU where the
    whole model doesn't fit a GPU. `deepspeed.init_distributed()` comes first.

    The loss is the family's own: the mean over the labels of a micro batch that aren't -100. `engine.train_batch`
    averages over micro batches and data-parallel ranks, so labels count more in micro batches that have few. Where the
    config says `output_router_logits`, the routers' auxiliary loss is added, of all layers and tokens of a micro batch
    as in the model's own forward; `eval_batch(return_logits=True)` then gives it with the logits.

    Args:
        model: a causal language model with its weights.
        num_stages: pipeline stages; may be left out where there is a `topology`.
        inputs: the columns of a batch that `pipeline_batch` passes on, `input_ids` first. Without
            `attention_mask`, no token is padding.
        topology, partition_method, activation_checkpoint_interval: see `PipelineModule`. Parameters are counted
            before experts are split. Decoder layers alone are checkpointed.
        dynamic_shape: whether batches may differ in shape. `False` saves one message a micro batch and pipeline stage.
        options: for `PipelineModule`.

    Returns:
        The module. `hf_names` has, for each prefix of its parameters' names, that of the Hugging Face name. `hf_config`
        and `hf_generation_config` are the model's.

    Raises:
        ConfigError: the model can't be taken apart so, on all ranks alike, with the reason.
    """
    check_names(tuple(inputs))
    structure = find_structure(model)
    _check_weights(model)
    stages = topology.get_dim("pipe") if topology is not None else num_stages
    _check_stages(stages, structure)
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]
    loss = CausalLoss(model)
    routers = check_pipe_layers(structure, tuple(inputs), loss)

    layerless = LayerlessModel(structure)
    specs = make_specs(structure, layerless, tuple(inputs[1:]), routers)
    layerless.take_apart()
    structure.layers.clear()
    # Reentrant checkpointing of a layer whose inputs are token ids alone would lose its gradients.
    options.setdefault("checkpointable_layers", [DecoderPipeLayer.__name__])
    module = PipelineModule(
        specs,
        num_stages=num_stages,
        topology=topology,
        loss_fn=loss,
        partition_method=partition_method,
        activation_checkpoint_interval=activation_checkpoint_interval,
        dynamic_shape=dynamic_shape,
        **options,
    )
    module.hf_names = dict(pair for index, spec in enumerate(specs) for pair in spec.names(index))
    module.hf_config, module.hf_generation_config = config, getattr(model, "generation_config", None)
    _keep_own(module, specs, layerless, structure)
    return module


def make_specs(
    structure: Structure, layerless: LayerlessModel, names: tuple[str, ...], routers: RouterLoss | None
) -> list[Spec]:
    """The pipeline's layers: embedding, decoder layers, norm, head."""
    tied = structure.tied
    embed, head = EmbedStep(layerless, names, routers), HeadStep(layerless, names, routers)
    if tied:
        _check_tied(structure)
        ((path, embedding),) = structure.before.items()
        specs: list[Spec] = [TiedPipeLayerSpec(embed, path, embedding)]
    else:
        specs = [PipeLayerSpec(PipeLayer, embed, structure.before, _first_type(structure.before))]
    for index, layer in enumerate(structure.layers):
        step = DecoderStep(layerless, names, routers, index)
        if routers is not None:
            step.watch(router_modules(structure.base, layer, f"{structure.layers_name}.{index}"))
        specs.append(PipeLayerSpec(DecoderPipeLayer, step, {f"{structure.layers_path}.{index}": layer}, type(layer)))
    norm = NormStep(layerless, names, routers)
    specs.append(PipeLayerSpec(PipeLayer, norm, structure.norm, _first_type(structure.norm)))
    if tied:
        specs.append(TiedPipeLayerSpec(head, path, embedding))
    else:
        specs.append(PipeLayerSpec(PipeLayer, head, structure.head, _first_type(structure.head)))
    return specs


def _first_type(modules: dict[str, nn.Module]) -> type[nn.Module]:
    return next((type(module) for module in modules.values()), PipeLayer)


def _keep_own(module: PipelineModule, specs: list[Spec], layerless: LayerlessModel, structure: Structure) -> None:
    """Tells the pipeline stage's first and last layer that they are, and lets go of what other stages have."""
    start, stop = module.partitions()[module.stage_id : module.stage_id + 2]
    specs[start].step.first, specs[stop - 1].step.last = start > 0, stop < len(specs)
    kept = {path for spec in specs[start:stop] for path in spec.modules}
    if structure.tied and any(isinstance(spec, TiedPipeLayerSpec) for spec in specs[start:stop]):
        kept |= set(structure.head) | set(structure.before)
    for group in (structure.before, structure.norm, structure.head):
        for path in group:
            if path not in kept:
                layerless.drop(path)
        group.clear()
    for spec in [*specs[:start], *specs[stop:]]:
        spec.release()
    gc.collect()  # modules and their hooks refer to each other


def _check_weights(model: nn.Module) -> None:
    for path in deferred_modules(model):
        raise refusal(model, f"has no weights yet in {path}: load it with the from_pretrained of transformers")
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "ds_id"):
            raise refusal(model, f"has no weights in {name}: load it on the CPU, outside of zero.Init")


def _check_stages(stages: Any, structure: Structure) -> None:
    if not dist.is_initialized():
        raise ConfigError("from_causal_lm needs the ranks' process group: call deepspeed.init_distributed() first.")
    world, layers = dist.get_world_size(), len(structure.layers)
    works = [n for n in range(1, layers + 1) if world % n == 0]
    if not isinstance(stages, int) or stages not in works:
        raise config_error(
            "from_causal_lm.num_stages",
            stages,
            f"must divide the {world} ranks and be no more than the {layers} layers",
            works=works,
        )


def _check_tied(structure: Structure) -> None:
    extra = [name for module in structure.head.values() for name, _ in module.named_parameters() if name != "weight"]
    if extra or len(structure.before) != 1 or len(structure.head) != 1:
        raise refusal(structure.lm, "ties its embedding with a head, and has more weights beside either")
