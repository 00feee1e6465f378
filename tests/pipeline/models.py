"""A pipeline made by hand of the parts of a small Mixtral, the same on every rank and in the oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding


class Embedding(nn.Module):
    """Token ids [B, T] to rows [B, T, H]; tied, it is the head as well."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Decoder(nn.Module):
    """A decoder layer that takes and gives rows [B, T, H] alone."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = MixtralRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rows: Tensor = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return rows


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers' causal models."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def make_pipeline(model: Any, stages: int, cuts: tuple[int, ...] = (), interval: int = 0, tp: int = 1) -> Any:
    """A `PipelineModule` of the parts of a Mixtral.

    Args:
        model: a `MixtralForCausalLM`; its embeddings are tied between the stages where its config says so.
        stages: how many.
        cuts: where each stage but the first begins, in layers: embedding, decoders, norm, head; even where empty.
        interval: of activation checkpointing, in layers.
        tp: tensor-parallel ranks in each stage.
    """
    layers: list[Any] = []
    names = {}
    if model.config.tie_word_embeddings:
        embedding = TiedLayerSpec("embed", Embedding, model.model.embed_tokens.weight)
        head: Any = TiedLayerSpec("embed", Embedding, model.lm_head.weight, forward_fn=Embedding.logits)
        names["tied_modules.embed."] = "model.embed_tokens."
    else:
        embedding, head = LayerSpec(Embedding, model.model.embed_tokens.weight), model.lm_head
        names["0."] = "model.embed_tokens."
    layers.append(embedding)
    for number, layer in enumerate(model.model.layers):
        names[f"{len(layers)}.layer."] = f"model.layers.{number}."
        layers.append(Decoder(layer, model.config))
    names[f"{len(layers)}."] = "model.norm."
    layers.append(model.model.norm)
    names[f"{len(layers)}."] = "lm_head."
    layers.append(head)
    made = type("Cut", (PipelineModule,), {"_partition_layers": _cut(cuts)}) if cuts else PipelineModule
    data = dist.get_world_size() // (stages * tp)
    module = made(
        layers,
        topology=PipeModelDataParallelTopology(stages, tp, data) if tp > 1 else PipeDataParallelTopology(stages, data),
        loss_fn=loss_of,
        partition_method="type:Decoder",
        activation_checkpoint_interval=interval,
        checkpointable_layers=["Decoder"],  # not the embedding: token ids have no gradient
    )
    module.hf_names, module.hf_config = names, model.config
    return module


def _cut(cuts: tuple[int, ...]) -> Any:
    def _partition_layers(self: Any, method: str = "") -> None:
        self.parts = [0, *cuts, len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    return _partition_layers
