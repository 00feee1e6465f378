"""Layers of the `PipelineModule` and their specs: embedding, decoder layers, norm, head.

Each takes what the one before gives, a tensor or a tuple of tensors.

Between them travel the hidden states, the columns of the batch that layers need besides, unchanged, and sums for the
routers' auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_etp.patches.transformers.router_outputs import router_logits
from ds_etp.pipeline.layerless import LayerlessModel
from ds_etp.pipeline.router_loss import RouterLoss, RouterSums

TIED = "embed"  # the key of the tied embedding in `PipelineModule.tied_modules`


@dataclass(frozen=True)
class PipeState:
    """What travels between pipeline layers: hidden states, columns of the batch by name, sums for the routers' loss."""

    hidden: Tensor
    extras: dict[str, Tensor]
    sums: RouterSums | None = None


class PipeStep:
    """What one pipeline layer does.

    Attributes:
        layerless: the model's own forward, without its decoder layers.
        names: the columns that travel beside the hidden states.
        routers: the routers' auxiliary loss, where the model has one.
        first, last: whether its input comes from another pipeline stage, and whether its output goes to one.
    """

    def __init__(self, layerless: LayerlessModel, names: tuple[str, ...], routers: RouterLoss | None) -> None:
        self.layerless, self.names, self.routers = layerless, names, routers
        self.first = self.last = False

    def read(self, inputs: Any) -> PipeState:
        """What came in."""
        first, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        sums = None
        if self.routers is not None:
            if self.first:
                first, prob_sums = self.routers.unpack(first)
            else:
                prob_sums = others.pop(0)
            sums = RouterSums(prob_sums, others.pop(0))
        return PipeState(first, dict(zip(self.names, others, strict=True)), sums)

    def write(self, state: PipeState) -> Any:
        """What goes out: a tensor, or a tuple of tensors whose first one alone, between stages, has a gradient."""
        parts = [state.hidden, *state.extras.values()]
        if self.routers is not None and state.sums is not None:
            parts.insert(1, state.sums.counts)
            if self.last:
                parts[0] = self.routers.pack(state.hidden, state.sums.prob_sums)
            else:
                parts.insert(1, state.sums.prob_sums)
        return tuple(parts) if len(parts) > 1 else parts[0]

    def run(self, module: nn.Module, inputs: Any) -> Any:
        """Does it; `module` holds the weights."""
        raise NotImplementedError


class EmbedStep(PipeStep):
    """Token ids `[B, S]` to hidden states `[B, S, H]`."""

    def run(self, module: nn.Module, inputs: Any) -> Any:
        ids, *others = inputs if isinstance(inputs, tuple) else (inputs,)
        extras = dict(zip(self.names, others, strict=True))
        hidden = self.layerless.embed({"input_ids": ids, **extras}, module.training)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # embeddings are frozen: the engine runs backward from this stage all the same
        sums = None if self.routers is None else self.routers.start(hidden.device)
        return self.write(PipeState(hidden, extras, sums))


class DecoderStep(PipeStep):
    """One decoder layer. `watch` hands it the modules whose outputs are router logits."""

    def __init__(
        self, layerless: LayerlessModel, names: tuple[str, ...], routers: RouterLoss | None, index: int
    ) -> None:
        super().__init__(layerless, names, routers)
        self.index = index
        self._logits: list[Tensor] = []

    def watch(self, modules: list[tuple[nn.Module, int]]) -> None:
        """Records router logits from now on: of each module, the output at an index."""
        for module, index in modules:
            module.register_forward_hook(partial(self._record, index))

    def _record(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._logits.append(router_logits(output, index))

    def run(self, module: nn.Module, inputs: Any) -> Any:
        state = self.read(inputs)
        call = self.layerless.calls(state.hidden, state.extras, module.training)[self.index]
        output = call.run(module.get_submodule("layer"), state.hidden)
        hidden, sums = output[0] if isinstance(output, tuple) else output, state.sums
        logits, self._logits = self._logits, []
        if self.routers is not None and sums is not None:
            for layer_logits in logits:
                sums = self.routers.add(sums, layer_logits, state.extras.get("attention_mask"))
        return self.write(PipeState(hidden, state.extras, sums))


class NormStep(PipeStep):
    """The last layer's hidden states to those of the base model."""

    def run(self, module: nn.Module, inputs: Any) -> Any:
        state = self.read(inputs)
        return self.write(replace(state, hidden=self.layerless.finish(state.hidden, module.training)))


class HeadStep(PipeStep):
    """Hidden states to logits `[B, S, V]`; with a routers' loss, to logits and that."""

    def run(self, module: nn.Module, inputs: Any) -> Any:
        state = self.read(inputs)
        logits = self.layerless.logits(state.hidden, module.training)
        if self.routers is None or state.sums is None:
            return logits
        return logits, self.routers.value(state.sums)


class PipeLayer(nn.Module):
    """Modules of the model, and the step that runs them."""

    def __init__(self, step: PipeStep, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._step = step
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, inputs: Any) -> Any:
        """A tensor or a tuple of tensors, to the same."""
        return self._step.run(self, inputs)


class DecoderPipeLayer(PipeLayer):
    """A decoder layer. Of pipeline layers, only these are checkpointed: an embedding has no input with a gradient."""


class PipeLayerSpec(LayerSpec):  # type: ignore[misc]
    """The `LayerSpec` of a pipeline layer that exists already, until it is released.

    Attributes:
        step: what the layer does.
        modules: the model's modules it holds, by their paths in the model.
    """

    def __init__(
        self, kind: type[PipeLayer], step: PipeStep, modules: dict[str, nn.Module], shown_as: type[nn.Module]
    ) -> None:
        super().__init__(shown_as)  # its name is what `partition_method="type:..."` looks at
        self.step, self.modules = step, modules
        self._layer: PipeLayer | None = kind(step, {_child(kind, path): module for path, module in modules.items()})
        self._kind = kind

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        assert self._layer is not None, "a layer of another pipeline stage"
        return self._layer

    def release(self) -> None:
        """Lets go of the layer."""
        self._layer, self.modules = None, {}

    def names(self, index: int) -> Iterable[tuple[str, str]]:
        """The prefix of each module in the pipeline, and in the model, if this is the pipeline's layer `index`."""
        return [(f"{index}.{_child(self._kind, path)}.", f"{path}.") for path in self.modules]


class TiedPipeLayerSpec(TiedLayerSpec):  # type: ignore[misc]
    """The `TiedLayerSpec` of the embedding, or of the head that has its weight."""

    def __init__(self, step: PipeStep, path: str, module: nn.Module) -> None:
        super().__init__(TIED, type(module), forward_fn=partial(_run_tied, step), tied_weight_attr="weight")
        self.step, self.modules = step, {path: module}

    def build(self, log: bool = False) -> nn.Module:
        """The embedding."""
        return next(iter(self.modules.values()))

    def release(self) -> None:
        """Lets go of the embedding."""
        self.modules = {}

    def names(self, index: int) -> Iterable[tuple[str, str]]:
        """The prefix of the embedding in the pipeline, and in the model."""
        return [(f"tied_modules.{TIED}.", f"{path}.") for path in self.modules]


def _run_tied(step: PipeStep, module: nn.Module, inputs: Any) -> Any:
    return step.run(module, inputs)


def _child(kind: type[PipeLayer], path: str) -> str:
    return "layer" if kind is DecoderPipeLayer else path.replace(".", "_")
