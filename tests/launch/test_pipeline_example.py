"""The example with pipeline stages, as it is started by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ds_etp.checkpoint.export_api import export_checkpoint
from tests.launch.test_launchers import ROOT, deepspeed_launcher, launch


@pytest.mark.full  # what it calls is tested in tests/pipeline
def test_it_trains_and_saves(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / "pipeline.json").read_text())
    config["expert_tensor_parallel"]["etp_size"] = 1  # two ranks are a stage each
    config["gradient_accumulation_steps"] = 2
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = str(ROOT / "examples" / "finetune_mixtral_pipeline.py")
    arguments = ["--deepspeed", str(tmp_path / "ds.json"), "--dataset", str(ROOT / "README.md"), "--seq_len", "16"]
    arguments += ["--steps", "4", "--eval_batches", "2"]
    arguments += ["--cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    code, output = launch(deepspeed_launcher("--module", "ds_etp", script, *arguments))
    assert code == 0 and "(fell by" in output, output[-4000:]
    export_checkpoint(tmp_path / "out", tmp_path / "hub")
    # All weights are there, under Hugging Face's names.
    _, found = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
