"""What `from_causal_lm` makes sure of before it takes a model apart, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_etp
from ds_etp.errors import ConfigError
from ds_etp.pipeline import pipeline_batch
from ds_etp.pipeline.batches import CausalLoss
from ds_etp.pipeline.build import make_specs
from ds_etp.pipeline.check import check_pipe_layers
from ds_etp.pipeline.layerless import LayerlessModel
from ds_etp.pipeline.router_loss import RouterLoss
from ds_etp.pipeline.structure import find_structure
from tests.families.discover import family
from tests.families.tiny import make_batch, make_tiny
from tests.models import make_model

NAMES = ("input_ids", "attention_mask")
# Scaled logits and tied; a head of its own class; chunked attention; state-space layers; gate by tokens of two kinds.
TAKEN_APART = ["cohere2_moe", "granitemoehybrid", "llama4", "nemotron_h", "longcat_flash"]
REFUSED = {
    "deepseek_v4": "position_embeddings is a dict",
    "gemma4": "argument 1 has a gradient",
    "glm_moe_dsa": "cannot be run without its layers",
    "nllb_moe": "has an encoder and a decoder",
    "qwen3_vl_moe": "as models with towers for images do",
    "zaya": "holds weights outside of its modules: input_hidden_states",
}


@pytest.mark.parametrize("name", TAKEN_APART)
def test_pipe_layers_give_what_the_model_gives(name: str) -> None:
    kind = family(name)
    model: Any = make_tiny(kind)
    batch = make_batch(kind, 0, 0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = mask[1, -2:] = 0
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    structure, loss = find_structure(model), CausalLoss(model)
    routers = check_pipe_layers(structure, NAMES, loss)
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    layerless = LayerlessModel(structure)
    specs = make_specs(structure, layerless, NAMES[1:], routers)
    layerless.take_apart()
    inputs, labels = pipeline_batch(batch)
    outputs: Any = inputs
    for spec in specs:
        outputs = spec.step.run(spec.build(), outputs)
    loss(outputs, labels).backward()
    # The same operations in the same order.
    assert torch.equal(loss(outputs, labels), expected)
    found = {
        f"{path}.{name}": parameter.grad
        for spec in specs
        for path, module in spec.modules.items()
        for name, parameter in module.named_parameters()
    }
    assert set(found) == set(grads)
    for name, grad in grads.items():
        # Of weights that are used twice (tied ones), the two parts may be added up in another order.
        assert (grad is None) == (found[name] is None) and (grad is None or torch.allclose(grad, found[name])), name


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    model: Any = make_tiny(family(name))
    before = [(path, id(module)) for path, module in model.named_modules()]
    with pytest.raises(ConfigError, match=r"from_causal_lm\.model=") as error:
        check_pipe_layers(find_structure(model), NAMES, CausalLoss(model))
    assert REFUSED[name] in str(error.value)
    assert [(path, id(module)) for path, module in model.named_modules()] == before


class _Bypass(torch.nn.Module):
    """A norm that adds what went into the first layer: no stage but the first has it."""

    def __init__(self, norm: torch.nn.Module, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.first: Any = None
        embedding.register_forward_hook(lambda module, args, output: setattr(self, "first", output))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(hidden + self.first)
        return normed


def test_a_bypass_of_the_layers_is_noticed() -> None:
    model = make_model("mixtral")
    model.model.norm = _Bypass(model.model.norm, model.model.embed_tokens)
    with pytest.raises(ConfigError, match="makes logits of more than the last layer's hidden states"):
        check_pipe_layers(find_structure(model), NAMES, CausalLoss(model))


def test_a_loss_of_its_own_is_noticed() -> None:
    model = make_model("mixtral")
    loss = CausalLoss(model)
    model.loss_function = lambda logits, labels, vocab_size, **_: 2 * logits.float().square().mean()
    with pytest.raises(ConfigError, match="loss of its own"):
        check_pipe_layers(find_structure(model), NAMES, loss)


def test_it_wants_ranks_first() -> None:
    with pytest.raises(ConfigError, match="init_distributed"):
        ds_etp.pipeline.from_causal_lm(make_model("mixtral"), 2)


def test_router_sums_travel_through_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    routers = RouterLoss(experts=40, top_k=2, weight=0.1)
    hidden = torch.randn(2, 5, 16, generator=generator).bfloat16().requires_grad_()
    prob_sums = (1000 * torch.rand(40, generator=generator)).requires_grad_()
    packed = routers.pack(hidden, prob_sums)
    assert packed.dtype == torch.bfloat16 and packed.shape == (2, 5 + 4, 16)  # 120 numbers in rows of 2 x 16
    got_hidden, got_prob_sums = routers.unpack(packed)
    grads = torch.randn(2, 5, 16, generator=generator).bfloat16(), torch.randn(40, generator=generator)
    torch.autograd.backward([got_hidden, got_prob_sums], grads)
    for ours, theirs in (
        (got_hidden, hidden),
        (got_prob_sums, prob_sums),
        (hidden.grad, grads[0]),
        (prob_sums.grad, grads[1]),
    ):
        assert torch.equal(ours, theirs)  # to the bit, both ways


def test_batches() -> None:
    ids = torch.arange(8).view(2, 4)
    (tokens, mask), labels = pipeline_batch({"input_ids": ids, "labels": ids})
    assert torch.equal(tokens, ids) and torch.equal(mask, torch.ones_like(ids)) and labels is ids
    batch = {"input_ids": ids, "labels": ids, "attention_mask": ids > 2}
    assert pipeline_batch(batch)[0][1].dtype == torch.long
    assert len(pipeline_batch(batch, ("input_ids",))[0]) == 1
    with pytest.raises(KeyError, match="position_ids"):
        pipeline_batch(batch, ("input_ids", "position_ids"))
    with pytest.raises(KeyError, match="labels"):
        pipeline_batch({"input_ids": ids})
