"""The model's own forward with stubs for its layers: each pipeline stage runs it to learn how layers are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_etp.pipeline.structure import LayerCall, Structure


class _EnoughError(Exception):
    """Leaves a forward whose rest isn't wanted."""


class _Base(nn.Module):
    """Takes the base model's place in the language model: gives the hidden states that are there already."""

    def __init__(self, output_class: Any) -> None:
        super().__init__()
        self.output_class = output_class
        self.fields: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The base model's output, whatever it is called with."""
        return self.output_class(**self.fields)


class LayerlessModel:
    """A model without its decoder layers, and without the weights that other pipeline stages hold.

    It is no module: its weights are registered with the pipeline layers that use them, and its buffers (rotary
    frequencies) keep their type when an engine casts the model.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._lm, self._base, self._trace = structure.lm, structure.base, structure.trace
        self._stub = _Base(structure.output_class)
        self._last = len(structure.layers) - 1
        self._seen: tuple[Any, tuple[Any, ...], tuple[LayerCall, ...]] | None = None
        self._ready: tuple[torch.device, bool] | None = None

    def take_apart(self) -> None:
        """Takes the layers and the base model out of the language model."""
        setattr(self._base, self._structure.layers_name, self._structure.layer_stubs())
        setattr(self._lm, self._structure.base_name, self._stub)

    def drop(self, path: str) -> None:
        """Takes out a module that another pipeline stage has, by its path in the model it came from."""
        top, _, rest = path.partition(".")
        root, inner = (self._base, rest) if top == self._structure.base_name else (self._lm, path)
        parent, _, name = inner.rpartition(".")
        setattr(root.get_submodule(parent), name, nn.Identity())

    def embed(self, batch: dict[str, Tensor], training: bool) -> Tensor:
        """What the first layer gets, from `input_ids` `[B, S]` and what else a batch has."""
        first: list[Tensor] = []

        def on_layer(index: int, hidden: Tensor, call: LayerCall) -> Tensor:
            first.append(hidden)
            raise _EnoughError

        self._prepare(batch["input_ids"].device, training)
        with self._trace.during(on_layer):
            self._run(**batch)
        return first[0]

    def calls(self, hidden: Tensor, extras: dict[str, Tensor], training: bool) -> tuple[LayerCall, ...]:
        """How each layer is called, for hidden states of this shape and type: masks, positions, rotary embeddings.

        Made once a micro batch, as the family's forward does, by the first layer of a stage that asks.
        """
        # Not by identity: checkpointing hands on other tensor objects. The memory can't be another tensor's while
        # it is held here.
        key = (hidden.shape, hidden.dtype, hidden.device, training, *map(_memory, extras.values()))
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, tuple(extras.values()), self._make_calls(hidden, extras, training))
        return self._seen[2]

    @torch.no_grad()
    def _make_calls(self, hidden: Tensor, extras: dict[str, Tensor], training: bool) -> tuple[LayerCall, ...]:
        found: list[LayerCall] = []

        def on_layer(index: int, hidden: Tensor, call: LayerCall) -> Tensor:
            found.append(call)
            if index == self._last:
                raise _EnoughError
            return hidden

        self._prepare(hidden.device, training)
        with self._trace.during(on_layer):
            self._run(inputs_embeds=hidden.detach(), **extras)
        return tuple(found)

    def finish(self, hidden: Tensor, training: bool) -> Tensor:
        """The base model's last hidden state, from what the last layer gave."""
        self._prepare(hidden.device, training)
        with self._trace.during(lambda index, passed, call: hidden if index == self._last else passed):
            output = self._run(inputs_embeds=hidden.detach())
        result: Tensor = output[0]
        return result

    def logits(self, last_hidden: Tensor, training: bool) -> Tensor:
        """Logits `[B, S, V]` from the base model's last hidden state."""
        logits: Tensor = self.head(last_hidden, training).logits
        return logits

    def head(self, last_hidden: Tensor, training: bool, routers: tuple[Tensor, ...] = (), **batch: Any) -> Any:
        """What the language model makes of its base model's output: of that, last hidden state and router logits."""
        self._prepare(last_hidden.device, training)
        self._stub.fields = {"last_hidden_state": last_hidden} | ({"router_logits": routers} if routers else {})
        try:
            return self._lm(inputs_embeds=last_hidden, use_cache=False, return_dict=True, **batch)
        finally:
            self._stub.fields = {}

    def _run(self, **batch: Any) -> Any:
        arguments = {**self._structure.call, **dict.fromkeys(("input_ids", "attention_mask", "position_ids")), **batch}
        if "inputs_embeds" not in batch:
            arguments.pop("inputs_embeds", None)
        try:
            return self._base(**arguments)
        except _EnoughError:
            return None

    def _prepare(self, device: torch.device, training: bool) -> None:
        """Moves buffers to where the hidden states are, and follows the engine into evaluation and back."""
        if self._ready != (device, training):
            for model in (self._base, self._lm):
                model.to(device).train(training)
            self._ready = (device, training)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.dtype
