"""Parts of a causal language model: base model, decoder layers, embedding, norm and head; and stubs of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.errors import ConfigError, config_error

# What a family's forward may hand to each layer besides the hidden states. Anything else could carry something from
# one layer to the next, which a pipeline would lose.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def refusal(model: nn.Module, rule: str) -> ConfigError:
    """The error for a model that can't be taken apart."""
    return config_error(
        "from_causal_lm.model",
        type(model).__name__,
        rule,
        works="causal language models whose layers pass on hidden states alone",
    )


@dataclass(frozen=True)
class LayerCall:
    """What a family's forward gives one layer besides the hidden states, which come first where `by_name` is False."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool

    def run(self, layer: nn.Module, hidden: Tensor) -> Any:
        """Calls a layer as the family does."""
        if self.by_name:
            return layer(*self.args, hidden_states=hidden, **self.kwargs)
        return layer(hidden, *self.args, **self.kwargs)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every value, with a name for it."""
        for name, value in [*((f"argument {i + 1}", value) for i, value in enumerate(self.args)), *self.kwargs.items()]:
            yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is tuple:
        for item in value:
            yield from _leaves(name, item)
    else:
        yield name, value


def unsupported_argument(call: LayerCall) -> str | None:
    """In words, a value of a call that a pipeline stage could not make anew; None where there is none."""
    for name, value in call.leaves():
        if isinstance(value, Tensor):
            if value.requires_grad:
                return f"{name} has a gradient"
        elif not isinstance(value, _PLAIN):
            return f"{name} is a {type(value).__name__}"
    return None


class LayerStub(nn.Module):
    """Takes a layer's place in the family's forward: it has the layer's plain attributes, and no weights."""

    def __init__(self, layer: nn.Module, index: int, trace: Trace) -> None:
        super().__init__()
        own = [cls for cls in type(layer).__mro__ if not issubclass(nn.Module, cls)]
        for name, value in (item for source in (*reversed(own), layer) for item in vars(source).items()):
            if not name.startswith("_") and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self._index, self._trace = index, trace

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hands on to whoever runs the forward."""
        by_name = "hidden_states" in kwargs
        hidden = kwargs.pop("hidden_states") if by_name else args[0]
        call = LayerCall(args if by_name else args[1:], kwargs, by_name)
        result = self._trace.on_layer(self._index, hidden, call)
        return (result,) if self._trace.tuples else result


@dataclass
class Trace:
    """What the stubs of one model do: `on_layer(index, hidden, call)` gives what a layer would.

    Attributes:
        tuples: whether this family's layers give a tuple that begins with the hidden states.
    """

    on_layer: Callable[[int, Tensor, LayerCall], Tensor] = field(default=lambda index, hidden, call: hidden)
    tuples: bool = False

    @contextmanager
    def during(self, on_layer: Callable[[int, Tensor, LayerCall], Tensor]) -> Iterator[None]:
        """Sets what the stubs do for the time of one run."""
        before, self.on_layer = self.on_layer, on_layer
        try:
            yield
        finally:
            self.on_layer = before


@dataclass
class Structure:
    """The parts of a model.

    Attributes:
        lm, base: the model, and the one inside it that holds the layers.
        base_name, layers_name: attributes of `lm` and of `base`.
        layers: the decoder layers, in order.
        before, norm, head: modules with weights that run before the layers, after them inside the base model, and
            outside of it; by path in `lm`.
        call: keyword arguments that `lm` calls `base` with, but for the batch.
        output_class: what `base` returns.
        trace: what the stubs do.
    """

    lm: Any
    base: Any
    base_name: str
    layers_name: str
    layers: list[nn.Module]
    trace: Trace
    before: dict[str, nn.Module] = field(default_factory=dict)
    norm: dict[str, nn.Module] = field(default_factory=dict)
    head: dict[str, nn.Module] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    output_class: Any = None

    @property
    def layers_path(self) -> str:
        """The path of the list of layers in the model."""
        return f"{self.base_name}.{self.layers_name}"

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        weights = {id(weight) for module in self.before.values() for weight in module.parameters()}
        return any(id(weight) in weights for module in self.head.values() for weight in module.parameters())

    @contextmanager
    def stubbed_layers(self) -> Iterator[None]:
        """Puts stubs in the layers' places for a while."""
        real = getattr(self.base, self.layers_name)
        setattr(self.base, self.layers_name, self.layer_stubs())
        try:
            yield
        finally:
            setattr(self.base, self.layers_name, real)

    def layer_stubs(self) -> nn.ModuleList:
        """A stub for each layer."""
        return nn.ModuleList(LayerStub(layer, index, self.trace) for index, layer in enumerate(self.layers))


def find_structure(model: Any) -> Structure:
    """The base model and its layers.

    Raises:
        ConfigError: the model is laid out in another way; the message says in which.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise refusal(model, "is not a model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "has an encoder and a decoder")
    if getattr(model, "hf_device_map", None):
        raise refusal(model, "was loaded with a device_map")
    if model.get_output_embeddings() is None:
        raise refusal(model, "has no language model head")
    bases = [(name, child) for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    if len(bases) != 1:
        raise refusal(model, f"should have one base model, and has {', '.join(name for name, _ in bases) or 'none'}")
    name, base = bases[0]
    lists = [
        (attribute, child)
        for attribute, child in base.named_children()
        if isinstance(child, nn.ModuleList) and any(True for _ in child.parameters())
    ]
    if len(lists) != 1:
        found = ", ".join(attribute for attribute, _ in lists) or "none, as models with towers for images do"
        raise refusal(model, f"should have one list of layers in {name}, and has {found}")
    attribute, layers = lists[0]
    if any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        raise refusal(model, "has gradient checkpointing switched on: use activation_checkpoint_interval instead")
    return Structure(model, base, name, attribute, list(layers), Trace())


def modules_with_weights(structure: Structure) -> dict[str, nn.Module]:
    """Modules outside the layers that own something a checkpoint holds, by path. For a model with stubs.

    Raises:
        ConfigError: the model itself owns some, which no call of a module tells the use of.
    """
    found = {}
    for path, module in structure.lm.named_modules(remove_duplicate=False):
        own = [name for name in module.state_dict() if "." not in name]
        if own and (module is structure.lm or module is structure.base):
            raise refusal(structure.lm, f"holds weights outside of its modules: {', '.join(own)}")
        if own:
            found[path] = module
    return found
