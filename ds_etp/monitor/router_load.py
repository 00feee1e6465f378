"""Counters of one experts module: tokens by expert and rows sent, of the forwards that are trained on.

Backward adds a forward's counts, by a hook on the module's output. It runs once for each forward that is trained on,
whatever recomputation does: under torch's non-reentrant checkpoints the recomputed output has no backward of its own;
under reentrant ones (DeepSpeed's too) the first output has none. Nothing is added under `no_grad`. The host waits for
nothing: counts stay on the device until a report asks for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RouterLoad:
    """What was counted since the last report.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self._counts: Tensor | None = None
        self._tokens = self._rows_sent = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterLoad:
        # A copied module (an EMA, say) has a load of its own, which nobody reports.
        return RouterLoad(self.num_experts)

    def observe(self, index: Tensor, output: Tensor, rows_sent: int) -> None:
        """Counts one forward, once it is trained on.

        Args:
            index: `[T, K]`, the experts of this rank's tokens. Numbers that are no expert's don't count.
            output: `[T, H]`, what the module returns for them.
            rows_sent: rows of H that this rank sent in this forward.
        """
        if not torch.is_grad_enabled():
            return
        counts, tokens = expert_counts(index, self.num_experts), len(output)

        def add(_: Tensor | None = None) -> None:
            self._counts = counts.clone() if self._counts is None else self._counts.add_(counts)
            self._tokens += tokens
            self._rows_sent += rows_sent

        if output.requires_grad:
            output.register_hook(add)
        elif torch._C._current_graph_task_id() == -1:
            # Nothing below it is trained, so it has no backward. Inside one it is recomputed, and was counted.
            add()

    def take(self, device: torch.device) -> tuple[Tensor, int, int]:
        """Tokens by expert `[E]`, tokens, and rows sent; and starts again from zero."""
        counts = self._counts
        taken = torch.zeros(self.num_experts, dtype=torch.int64, device=device) if counts is None else counts
        result = taken, self._tokens, self._rows_sent
        self._counts, self._tokens, self._rows_sent = None, 0, 0
        return result


def expert_counts(index: Tensor, num_experts: int) -> Tensor:
    """How often each of E experts is in an index: `[E]`, without atomics and without a host sync."""
    ordered = index.detach().flatten().sort().values
    bounds = torch.arange(num_experts + 1, dtype=ordered.dtype, device=ordered.device)
    return torch.searchsorted(ordered, bounds).diff()
