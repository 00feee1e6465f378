"""Adapters that can't be split are refused on every rank, before a group is made or the model changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import peft
import pytest
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

import ds_etp
from ds_etp.errors import ConfigError
from tests.config.test_refusals import Refusal, count_groups, state
from tests.launcher import Launcher
from tests.models import make_model
from tests.peft.models import BOTH
from tests.sharded import Layout, ds_config


@dataclass(frozen=True)
class Case:
    """What is refused: how the adapters are made, on which layout, and what the message holds, in order."""

    says: tuple[str, ...]
    adapt: Callable[[Any], Any]
    tp: int = 2


def ia3(model: Any) -> Any:
    return get_peft_model(model, IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"))


def dora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"))


def embeddings(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM"))


def head(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))


def saved_head(model: Any) -> Any:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def prompt(model: Any) -> Any:
    return get_peft_model(model, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


def unplanned(model: Any) -> Any:
    model.config.base_model_tp_plan = None
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def injected(model: Any) -> Any:
    return peft.inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)


KEY = "tensor_parallel.autotp_size=2 cannot split base_model.model."
CASES = {
    "another method": Case((KEY, "self_attn.k_proj: it is wrapped by PEFT as", "Values that work: 1, or"), ia3),
    "a variant": Case((KEY, "self_attn.q_proj: it has a variant of LoRA, DoraLinearVariant"), dora),
    "embeddings": Case((KEY, "embed_tokens: it is wrapped by PEFT as Embedding"), embeddings),
    "the output layer": Case((KEY, "lm_head: it is the output layer"), head),
    "a saved output layer": Case((KEY, "lm_head: it is wrapped by PEFT as ModulesToSaveWrapper"), saved_head),
    "no plan": Case((KEY, "self_attn.q_proj: it has adapters, and neither the model (tp_plan)"), unplanned),
    "prompts": Case(("peft_config='PROMPT_TUNING' learns prompts",), prompt, tp=1),
    "no PeftModel": Case(("model='MixtralForCausalLM' has adapters inside and no PeftModel around",), injected, tp=1),
}


# In the workers


def all_refused() -> dict[str, Refusal]:
    """One case after another."""
    ds_etp.register()
    seen = {}
    for name, case in CASES.items():
        config = ds_config(BOTH, Layout(2, case.tp, 2))
        model = case.adapt(make_model("mixtral"))
        before, groups = state(model), count_groups()
        kind, text = "none", ""
        try:
            deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        seen[name] = Refusal(kind, text, count_groups() - groups, state(model) == before)
    return seen


# In pytest


@pytest.fixture(scope="module")
def refusals(launcher: Launcher) -> list[dict[str, Refusal]]:
    """Every case on two ranks."""
    return launcher.run(2, all_refused)


@pytest.mark.parametrize("name", CASES)
def test_refused_on_every_rank(refusals: list[dict[str, Refusal]], name: str) -> None:
    case, seen = CASES[name], [by_name[name] for by_name in refusals]
    assert {refusal.kind for refusal in seen} == {"ConfigError"}, seen[0].text
    assert len({refusal.text for refusal in seen}) == 1, "ranks differ"
    place = 0
    for part in case.says:
        place = seen[0].text.find(part, place)
        assert place >= 0, f"{part!r} is missing in {seen[0].text!r}"
    assert [refusal.new_groups for refusal in seen] == [0] * 2, "process groups were made before the refusal"
    assert all(refusal.unchanged for refusal in seen), "the model was changed before the refusal"


def test_a_release_with_another_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    from ds_etp.patches.signatures import check_signatures

    monkeypatch.setattr(ParamWrapper, "get_delta_factors", lambda self, adapter, dtype: None, raising=False)
    known = (
        r"peft='[\d.]+' has functions .* for adapters on experts, .*ParamWrapper\.get_delta_factors is "
        r"\(self, adapter, dtype\), known: \(self, adapter_name\) or missing\. Values that work: 0\.18 to 0\.21"
    )
    with pytest.raises(ConfigError, match=known) as info:
        check_signatures("peft.experts")
    # With a trainer that pins another release, what it says to install breaks that pin.
    assert "Where another package pins peft: put adapters on other layers than experts" in str(info.value)
    check_signatures("peft")  # which adapters on other layers need
