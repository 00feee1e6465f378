"""Column-split layers that are called with one tensor sum its gradient over the tensor-parallel group once.

AutoTP (deepspeed 0.19.5 to 0.19.8) sums the gradient of every column-split layer's input by itself: three messages for
an attention's q, k and v, where their sum is what anybody wants. Here the layers of one parent that get the same tensor
pass it through one `ColumnParallel`, and autograd adds up the parts before it sends them. Can go when AutoTP does so.
"""

from __future__ import annotations

from typing import Any

from deepspeed.module_inject import layers as host
from torch import Tensor, nn


class SharedColumnInput:
    """What the column-split layers of one parent were called with, while that parent's forward runs."""

    def __init__(self) -> None:
        self._running = False
        self._given: Tensor | None = None
        self._copied: Tensor | None = None

    def begin(self, *_: Any) -> None:
        """A pre-forward hook of the parent."""
        self.end()
        self._running = True

    def end(self, *_: Any) -> None:
        """A forward hook of the parent: what is kept longer would keep the graph of a whole forward."""
        self._running, self._given, self._copied = False, None, None

    def copied(self, tensor: Tensor, group: Any) -> Tensor:
        """The tensor, with the sum over the group in its backward: one and the same for one tensor."""
        if self._given is tensor and self._copied is not None:
            return self._copied
        copied: Tensor = host.ColumnParallel.apply(group, tensor)
        if self._running:
            self._given, self._copied = tensor, copied
        return copied


class SharedInputColumnLinear(host.LinearLayer):  # type: ignore[misc]  # DeepSpeed has no types
    """A column-split layer with siblings."""

    def forward(self, input: Tensor) -> Any:
        """The host's, which adds no sum of its own where it knows no group."""
        layer: Any = self
        if getattr(layer, "defer_collectives_to_compiler", False):
            return super().forward(input)
        group, copied = layer.mp_group, layer.ds_etp_input.copied(input, layer.mp_group)
        layer.mp_group = None
        try:
            return super().forward(copied)
        finally:
            layer.mp_group = group


def fuse_column_input_grads(model: nn.Module) -> None:
    """Makes every parent's column-split layers share the messages of their inputs' gradients."""
    for parent in list(model.modules()):
        layers: list[Any] = [child for child in parent.children() if _is_plain(child)]
        if len(layers) < 2:
            continue
        shared = SharedColumnInput()
        for layer in layers:
            layer.__class__, layer.ds_etp_input = SharedInputColumnLinear, shared
        parent.register_forward_pre_hook(shared.begin)
        parent.register_forward_hook(shared.end, always_call=True)


def _is_plain(layer: Any) -> bool:
    """Whether a layer sums its input's gradient, in the plain way, and needs its group for nothing else in forward."""
    return (
        type(layer) is host.LinearLayer
        and layer.mp_group is not None
        and not getattr(layer, "gather_output", False)
        and not getattr(type(layer), "tp_overlap_comm", False)
    )
