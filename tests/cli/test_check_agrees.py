"""`ds-etp check --model` refuses with the words of the engine, and lets through what the engine takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import transformers

import ds_etp
from ds_etp.cli.main import main
from ds_etp.log import logger
from tests.launcher import Launcher

TINY = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "torch_dtype": "bfloat16",
}
SWITCH = {
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "model_type": "switch_transformers",
    **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_heads": 4, "num_layers": 2},
    **{"num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: (model's config, block, phrase of the refusal)
    "fits": (TINY, {"etp_size": 2}, ""),
    "experts": (TINY | {"num_local_experts": 3}, {"ep_size": 2}, "number of experts 3 is not divisible by 2"),
    "columns": (TINY | {"intermediate_size": 15}, {"etp_size": 2}, "intermediate size 15 is not divisible by 2"),
    "alignment": (TINY | {"intermediate_size": 8}, {"etp_size": 2}, ""),
    "family": (SWITCH, {"etp_size": 2}, "each expert is a module of its own"),
    "dense": (TINY | {"architectures": ["MixtralModel"], "num_hidden_layers": 0}, {}, "found no routed experts"),
}


def engine_says(folder: str) -> tuple[str, list[str]]:
    """The message of a refusal, or nothing; and what it warns of."""
    ds_etp.register()
    warnings: list[str] = []
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0])._from_config(config)
    try:
        with mock.patch.object(logger(), "warning", warnings.append):
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=json.loads(Path(folder, "ds.json").read_text())
            )
    except ds_etp.ConfigError as error:
        return str(error), warnings
    engine.destroy()
    return "", warnings


@pytest.mark.parametrize("case", CASES)
def test_it_says_what_the_engine_says(
    case: str, launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, block, phrase = CASES[case]
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "expert_tensor_parallel": block,
    }
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps(ds_config), encoding="utf-8")
    code = main(["check", str(tmp_path / "ds.json"), "--gpus", "2", "--model", str(tmp_path)])
    out, said = capsys.readouterr()
    said = said.rstrip("\n")
    assert code == (2 if phrase else 0)
    assert phrase in said
    (refusal, warnings), other = launcher.run(2, engine_says, folder=str(tmp_path))
    assert (refusal, other) == (said, (said, []))
    assert len(warnings) == (case == "alignment")
    assert all(f"- {warning}" in " ".join(out.split()) for warning in warnings)


def autotp_says(folder: str) -> str:
    """DeepSpeed's own refusal of a tensor-parallel plan, or nothing."""
    ds_etp.register()
    model = transformers.OlmoeForCausalLM._from_config(transformers.AutoConfig.from_pretrained(folder))
    try:
        deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=json.loads(Path(folder, "ds.json").read_text())
        )
    except ValueError as error:
        return str(error)
    return ""


def test_it_foresees_what_autotp_refuses(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    olmoe = TINY | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 4}
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "expert_tensor_parallel": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(olmoe), encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps(ds_config), encoding="utf-8")
    assert main(["check", str(tmp_path / "ds.json"), "--gpus", "2", "--model", str(tmp_path)]) == 2
    assert "AutoTP refuses the styles rowwise_split_input" in capsys.readouterr().err
    for message in launcher.run(2, autotp_says, folder=str(tmp_path)):
        assert "unsupported partition style(s): ['rowwise_split_input']" in message
