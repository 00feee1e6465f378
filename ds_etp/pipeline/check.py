"""Compares the pipeline layers of a model with its own forward, to the bit, before the model is taken apart.

The family's own forward is run on a small batch with stubs for the layers, so it costs an embedding and a head
whatever the model's size. Then the same is asked of the layerless model, one pipeline layer at a time, from other
hidden states. All that each layer would get, the logits and the loss have to be equal to the bit. The layers
themselves are not run, so what one leaves to another behind the forward's back, in a module or a global, is not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.errors import ConfigError
from ds_etp.pipeline.batches import CausalLoss
from ds_etp.pipeline.layerless import LayerlessModel
from ds_etp.pipeline.router_loss import RouterLoss
from ds_etp.pipeline.structure import LayerCall, Structure, modules_with_weights, refusal, unsupported_argument

ROWS, LENGTH = 2, 8


@dataclass
class Reference:
    """What the family's own forward did: the hidden states each layer got, how it was called, what came out."""

    hidden: list[Tensor] = field(default_factory=list)
    calls: list[LayerCall] = field(default_factory=list)
    logits: Any = None
    loss: Any = None


def stub_output(index: int, hidden: Tensor) -> Tensor:
    """Hidden states that tell the layers apart."""
    return hidden * 0.75 + 0.01 * (index + 1)


def small_batch(model: Any, names: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """`[2, 8]` tokens, one row padded on the left and one on the right, as the columns that `names` asks for."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long, device=device)
    mask[0, :2] = mask[1, -3:] = 0
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(ROWS * LENGTH, device=device).view(ROWS, LENGTH) * 7 + 3) % vocabulary
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "labels": ids.masked_fill(mask == 0, -100),
    }
    return {name: columns[name] for name in (*names, "labels")}


def check_pipe_layers(structure: Structure, names: tuple[str, ...], loss: CausalLoss) -> RouterLoss | None:
    """Fills in the structure, and compares the pipeline layers with the whole model. The model is as it was afterwards.

    Returns:
        The routers' auxiliary loss that the model's forward adds, if it does.

    Raises:
        ConfigError: says what differs, or what was not understood.
    """
    lm = structure.lm
    batch = small_batch(lm, names, lm.get_input_embeddings().weight.device)
    labels = batch.pop("labels")
    training, routed = lm.training, asks_for_router_loss(lm)
    lm.eval()
    try:
        if routed:
            lm.config.output_router_logits = False
        reference = _run_whole(structure, batch, labels)
        with taken_apart(structure) as layerless:
            last = _compare(structure, layerless, reference, batch, labels, loss)
            return _router_loss(lm, layerless, last, batch.get("attention_mask"), labels, loss) if routed else None
    finally:
        lm.train(training)
        if routed:
            lm.config.output_router_logits = True


def asks_for_router_loss(model: Any) -> bool:
    """Whether the config has the model's forward add the routers' loss, where it can."""
    return bool(getattr(model.config, "output_router_logits", False))


@contextmanager
def taken_apart(structure: Structure) -> Iterator[LayerlessModel]:
    """The layerless model, for a while."""
    layers = getattr(structure.base, structure.layers_name)
    layerless = LayerlessModel(structure)
    layerless.take_apart()
    try:
        yield layerless
    finally:
        setattr(structure.lm, structure.base_name, structure.base)
        setattr(structure.base, structure.layers_name, layers)


def _run_whole(structure: Structure, batch: dict[str, Tensor], labels: Tensor) -> Reference:
    """The family's forward, with stubs that give tensors, or failing that, tuples."""
    for tuples in (False, True):
        structure.trace.tuples = tuples
        try:
            with structure.stubbed_layers():
                return _Recorder(structure).run(batch, labels)
        except ConfigError:
            raise
        except Exception as error:  # whatever a family's own code makes of stubs
            fault = error
    raise refusal(
        structure.lm, f"cannot be run without its layers: {type(fault).__name__}: {str(fault).splitlines()[0]}"
    ) from fault


class _Recorder:
    """One run of the family's forward, and which of its modules ran when."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self.reference = Reference()
        self.phase = "before"
        self.phases: dict[str, set[str]] = {}
        self.given: Tensor | None = None

    def on_layer(self, index: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Records a layer's call. The hidden states have to be what the layer before gave."""
        structure, reference = self.structure, self.reference
        if index != len(reference.calls) or not (index == 0 or hidden is self.given):
            raise RuntimeError(f"layer {index} does not get what layer {index - 1} gives")
        if not isinstance(hidden, Tensor):
            raise RuntimeError(f"layers get a {type(hidden).__name__}, not a tensor")
        reference.hidden.append(hidden.detach())
        reference.calls.append(call)
        self.phase = "norm" if index == len(structure.layers) - 1 else "layers"
        self.given = stub_output(index, hidden)
        return self.given

    def run(self, batch: dict[str, Tensor], labels: Tensor) -> Reference:
        """Runs it, and fills in the structure."""
        structure, batch_and_labels = self.structure, {**batch, "labels": labels}
        modules = modules_with_weights(structure)
        hooks = [
            module.register_forward_pre_hook(lambda *_, path=path: self.phases.setdefault(path, set()).add(self.phase))
            for path, module in modules.items()
        ]
        hooks.append(structure.base.register_forward_pre_hook(self._enter_base, with_kwargs=True))
        hooks.append(structure.base.register_forward_hook(self._leave_base))
        self.batch = batch
        try:
            with structure.trace.during(self.on_layer):
                output = structure.lm(**batch_and_labels, use_cache=False, return_dict=True)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self.reference.calls) != len(structure.layers):
            raise RuntimeError(f"it ran {len(self.reference.calls)} of {len(structure.layers)} layers")
        self.reference.logits, self.reference.loss = output.logits.detach(), output.loss.detach()
        self._sort(modules)
        return self.reference

    def _enter_base(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(inspect.signature(base.forward).bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        ours = {id(tensor) for tensor in self.batch.values()}
        for name, value in given.items():
            if isinstance(value, Tensor) and id(value) not in ours:
                raise RuntimeError(f"the model makes {name} itself")
        self.structure.call = {name: value for name, value in given.items() if not isinstance(value, Tensor)}

    def _leave_base(self, base: nn.Module, args: Any, output: Any) -> None:
        self.structure.output_class = type(output)
        self.phase = "head"

    def _sort(self, modules: dict[str, nn.Module]) -> None:
        """Which pipeline layer each module with weights belongs to."""
        structure = self.structure
        structure.before, structure.norm, structure.head = {}, {}, {}
        for path, module in modules.items():
            phases = self.phases.get(path, set())
            if len(phases) != 1 or phases == {"layers"}:
                when = " and ".join(sorted(phases)) or "never"
                raise RuntimeError(f"weights of {path} are used outside of one pipeline layer ({when})")
            getattr(structure, next(iter(phases)))[path] = module


def _compare(
    structure: Structure,
    layerless: LayerlessModel,
    reference: Reference,
    batch: dict[str, Tensor],
    labels: Tensor,
    loss: CausalLoss,
) -> Tensor:
    """Compares the pipeline layers with the whole model. Gives a last hidden state of the base model."""
    lm = structure.lm
    extras = {name: value for name, value in batch.items() if name != "input_ids"}
    for index, call in enumerate(reference.calls):
        unsupported = unsupported_argument(call)
        if unsupported:
            raise refusal(lm, f"cannot be cut between layers: {unsupported} (layer {index})")
    try:
        # Another batch in between, so that what the model's modules remember of this one is gone, as on another stage.
        other = {name: value.flip(0, 1) for name, value in batch.items()}
        layerless.embed(other, training=False)
        layerless.calls(reference.hidden[0], {name: other[name] for name in extras}, training=False)
        # Other hidden states than the family's forward had: what a layer gets besides must not depend on them.
        last = stub_output(len(structure.layers) - 1, reference.hidden[-1])
        calls = layerless.calls(last, extras, training=False)
        finished = layerless.finish(last, training=False)
        logits = layerless.logits(finished, training=False)
        value = loss(logits, labels)
        first = layerless.embed(batch, training=False)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else ""
        raise refusal(lm, f"cannot be run layer by layer: {type(error).__name__}: {line}") from error
    if not torch.equal(first, reference.hidden[0]):
        raise refusal(lm, "embeds tokens in a way that was not understood")
    for index, (call, wanted) in enumerate(zip(calls, reference.calls, strict=True)):
        fault = _difference(call, wanted)
        if fault:
            raise refusal(lm, f"gives layer {index} something that depends on more than mask and positions: {fault}")
    if not torch.equal(logits, reference.logits):
        raise refusal(lm, "makes logits of more than the last layer's hidden states")
    if not torch.equal(value, reference.loss):
        raise refusal(lm, "has a loss of its own, not the mean over tokens")
    return finished.detach()


def _router_loss(
    lm: Any, layerless: LayerlessModel, last: Tensor, mask: Tensor | None, labels: Tensor, loss: CausalLoss
) -> RouterLoss | None:
    """The routers' loss, compared with the family's own on made-up router logits."""
    experts, top_k, weight = (
        getattr(lm, name, getattr(lm.config, name, None))
        for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    )
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(labels.numel(), experts or 1, generator=generator).to(last) for _ in range(3))
    plain = layerless.head(last, False, labels=labels)
    lm.config.output_router_logits = True
    try:
        theirs = layerless.head(last, False, logits, attention_mask=mask, labels=labels)
    finally:
        lm.config.output_router_logits = False
    if getattr(theirs, "aux_loss", None) is None:
        return None  # the family has no such loss, whatever its config says
    advice = "set config.output_router_logits=False"
    if not experts or not top_k or weight is None:
        raise refusal(lm, f"adds a loss of its routers whose sizes were not found: {advice}")
    routers = RouterLoss(int(experts), int(top_k), float(weight))
    sums = routers.start(labels.device)
    for layer_logits in logits:
        sums = routers.add(sums, layer_logits, mask)
    aux = routers.value(sums)
    loss.router_weight = routers.weight
    ours = loss((plain.logits, aux), labels)
    # Older releases sum in another order.
    if not torch.allclose(aux, theirs.aux_loss, rtol=1e-5) or not torch.allclose(ours, theirs.loss, rtol=1e-5):
        raise refusal(lm, f"adds a loss of its routers that was not understood: {advice}")
    return routers


def _difference(call: LayerCall, wanted: LayerCall) -> str | None:
    ours, theirs = list(call.leaves()), list(wanted.leaves())
    if call.by_name != wanted.by_name or [name for name, _ in ours] != [name for name, _ in theirs]:
        return "other arguments"
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        if type(a) is not type(b) or (both and (a.dtype != b.dtype or not torch.equal(a, b))) or (not both and a != b):
            return name
    return None
