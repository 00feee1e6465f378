"""Training on sequences that are split over ranks (Ulysses), and the same training on whole ones.

Everything but the recipe runs in worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.oracle import Recipe, Run
from tests.sharded import Layout, make_engine, run_steps

CORE = "sdpa"  # the attention that Ulysses wraps; it has none of its own


@dataclass(frozen=True)
class Sequences(Recipe):
    """A recipe whose batches hold positions, and labels that are shifted before they are split.

    The routers' auxiliary loss is off: transformers computes it from the tokens a rank has, and a mean over parts
    of a sequence is not that of the sequence, with experts split or not.

    Attributes:
        unlabelled: labels left out at the start of each row, so that the parts of a sequence count differently.
    """

    # Ulysses (deepspeed 0.19.8) takes head_dim as it is where a config has it, and Mixtral's is None.
    changes: tuple[tuple[str, Any], ...] = (("output_router_logits", False), ("head_dim", 8))
    unlabelled: int = 3

    def batch(self, step: int, micro: int, data_rank: int) -> dict[str, Tensor]:
        """One micro batch of one data-parallel rank, whole sequences."""
        batch = super().batch(step, micro, data_rank)
        ids, labels = batch["input_ids"], batch["labels"]
        labels[:, : self.unlabelled] = -100
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        return {
            "input_ids": ids,
            "labels": labels,
            "shift_labels": shifted,
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        }

    def compute_loss(self, model: Any, batch: dict[str, Tensor], routers: list[Any] | None = None) -> Tensor:
        """The mean over the labels of the whole sequences, on each of the ranks that share them."""
        loss: Tensor = model(**batch).loss
        if not dist.is_initialized() or groups._get_sequence_parallel_world_size() == 1:
            return loss
        return aggregate(loss, batch["shift_labels"])


def aggregate(loss: Tensor, labels: Tensor) -> Tensor:
    """The loss over all parts of a sequence, weighted by their labels.

    DeepSpeed's tutorial and transformers' Trainer gather the losses, which is the same, forward and backward: each
    rank's loss gets the gradients of all of them. But torch's (2.13) gather has no backward for a gloo group that
    begins after rank 0.
    """
    counts = (labels != -100).sum().to(loss)
    # The mean over no labels is not a number; the tutorial and Trainer leave it out too.
    both = torch.stack([torch.where(counts > 0, loss, 0) * counts, counts])
    weighted, total = torch.distributed.nn.functional.all_reduce(both, group=groups._get_sequence_parallel_group())
    return weighted / total


@contextmanager
def ulysses(model: Any, layout: Layout, rows: int) -> Iterator[Any]:
    """DeepSpeed's sequence parallelism for a model: the mpu to initialize with. Takes the attention back after."""
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=CORE,
            sequence_parallel_size=layout.sp,
            micro_batch_size=rows,
        )
    finally:
        give_attention_back()


def give_attention_back() -> None:
    """Ulysses replaces the attention function for the whole process, which has other cases to run."""
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop(CORE, None)


@contextmanager
def engine_for(recipe: Sequences, layout: Layout) -> Iterator[Any]:
    """An engine on this process's rank, with Ulysses where the layout has it."""
    if layout.sp == 1:
        engine = make_engine(recipe, layout)
        yield engine
        engine.destroy()
        return
    with ulysses(recipe.model(), layout, recipe.rows) as mpu:
        engine = make_engine(recipe, layout, mpu=mpu)
        yield engine
        engine.destroy()


def train(recipe: Sequences, layout: Layout) -> Run | None:
    """Trains the recipe on this process's rank. Rank 0 returns the run, in full tensors."""
    with engine_for(recipe, layout) as engine:
        run = run_steps(engine, recipe, layout)
    return run if dist.get_rank() == 0 else None


def save_half_way(recipe: Sequences, layout: Layout, folder: str, steps: int) -> None:
    """Trains the first steps and saves."""
    with engine_for(recipe, layout) as engine:
        run_steps(engine, replace(recipe, steps=steps), layout)
        engine.save_checkpoint(folder)


def go_on(recipe: Sequences, layout: Layout, folder: str, steps: int) -> Run | None:
    """Loads into an engine with other weights and trains the steps that are left. Rank 0 returns the run."""
    with engine_for(replace(recipe, seed=99), layout) as engine:
        path, _ = engine.load_checkpoint(folder)
        assert path is not None
        run = run_steps(engine, recipe, layout, first=steps)
    return run if dist.get_rank() == 0 else None
