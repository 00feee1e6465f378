"""`ds-etp check --model`: what it says of real models' configs, and which refusals it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ds_etp.cli.check_model import path_pattern
from ds_etp.cli.main import main
from tests.families.discover import family
from tests.families.shrink import shrink
from tests.families.special import CHANGES
from tests.families.tiny import model_class
from tests.unit.test_cli import rows

ROOT = Path(__file__).parents[2]
# As published.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
TINY_MIXTRAL = MIXTRAL_8X7B | {
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def check(folder: Path, model: str, *more: str, gpus: int = 8, tp: int = 1, **block: Any) -> int:
    config = {"tensor_parallel": {"autotp_size": tp}, "expert_tensor_parallel": block}
    path = folder / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return main(["check", str(path), "--gpus", str(gpus), "--model", model, *more])


def test_mixtral_8x7b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = psutil.Process().memory_info().rss
    assert check(tmp_path, write_model(tmp_path, MIXTRAL_8X7B), tp=2, etp_size=4, ep_size=2) == 0
    # 93 GB of weights; what is seen here is mostly torch's and DeepSpeed's modules.
    assert psutil.Process().memory_info().rss - before < 2**30
    out, err = capsys.readouterr()
    assert err == ""
    table = rows(out)
    layers = "model.layers.{0..31}.mlp.experts"
    assert ["dispatcher", "alltoall (auto)"] in table
    assert ["rows sent", "11.00 a token"] in table
    held = "4 experts, 3584 columns, 10.5 GiB"
    assert [layers, "MixtralExperts", "grouped_mm", "8", "14336", "4096", "2", held] in table
    cut = "dimension 1 in 2 blocks"
    assert [layers, "gate_up_proj", "8 x 28672 x 4096", "4 x 7168 x 4096", cut] in table
    assert ["", "down_proj", "8 x 4096 x 14336", "4 x 4096 x 3584", "dimension 2"] in table
    # 46.7 billion in all, as published.
    assert ["experts, whole", f"{32 * 8 * 3 * 14336 * 4096:,}", "84.0 GiB"] in table
    assert ["dense layers, whole", f"{46_702_792_704 - 32 * 8 * 3 * 14336 * 4096:,}", "3.0 GiB"] in table
    assert ["experts, on one rank (etp 4 x ep 2)", f"{32 * 3 * 14336 * 4096:,}", "10.5 GiB"] in table
    assert ["layers.*.self_attn.o_proj", "rowwise"] in table
    assert not any("experts" in row[0] and len(row) == 2 for row in table if row[0].startswith("layers.*"))
    assert "must run the same number of forward passes" in out


def test_deepseek_v3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, write_model(tmp_path, DEEPSEEK_V3), gpus=64, etp_size=2, ep_size=32) == 0
    out = capsys.readouterr().out
    layers = "model.layers.{3..60}.mlp.experts"
    held = "8 experts, 1024 columns, 19.0 GiB"
    assert [layers, "DeepseekV3Experts", "grouped_mm", "256", "2048", "7168", "8", held] in rows(out)
    assert ["experts, whole", f"{58 * 256 * 3 * 2048 * 7168:,}", "1.2 TiB"] in rows(out)
    assert "quantized weights (fp8)" in out
    assert "Attention is not split" in out


def test_zero3_partitions_what_a_rank_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "expert_tensor_parallel": {"etp_size": 2}}
    (tmp_path / "ds3.json").write_text(json.dumps(ds), encoding="utf-8")
    model = write_model(tmp_path, TINY_MIXTRAL | {"intermediate_size": 64, "torch_dtype": "float32"})
    assert main(["check", str(tmp_path / "ds3.json"), "--gpus", "8", "--model", model]) == 0
    out = capsys.readouterr().out
    whole = 2 * 8 * 3 * 64 * 32
    assert "Parameters, in float16" in out
    assert ["experts, on one rank (etp 2 x ep 1)", f"{whole // 2:,}", f"{whole / 1024:.1f} KiB"] in rows(out)
    assert ["... partitioned by ZeRO-3 (edp 4)", f"{whole // 8:,}", f"{whole / 4096:.1f} KiB"] in rows(out)


# family -> the sizes of each group: layers, E, I, H, K
FAMILIES = {
    "gpt_oss": [["model.layers.{0..1}.mlp.experts", "4", "16", "32", "2"]],
    "llama4": [["model.layers.{0..1}.feed_forward.experts", "4", "16", "32", "2"]],
    "longcat_flash": [["model.layers.{0..1}.mlp.experts", "4 + 4", "16", "32", "2"]],
    "step3p7": [["model.language_model.layers.1.mlp.experts", "4", "16", "32", "2"]],
    "ernie4_5_vl_moe": [
        ["model.language_model.layers.1.mlp.text_moe.experts", "4", "16", "32", "2"],
        ["model.language_model.layers.1.mlp.vision_moe.experts", "4", "32", "32", "2"],
    ],
    "diffusion_gemma": [
        ["model.encoder.language_model.layers.{0..1}.experts", "4", "16", "32", "2"],
        ["model.decoder.layers.{0..1}.experts", "4", "16", "32", "2"],
    ],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_other_kinds_and_composite_models(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cls = model_class(family(name))
    config = shrink(cls.config_class, CHANGES.get(name, {}))
    config.architectures = [cls.__name__]
    config.save_pretrained(tmp_path)
    assert check(tmp_path, str(tmp_path / "config.json"), etp_size=2, ep_size=2) == 0
    out = capsys.readouterr().out
    modules = [row for row in rows(out) if len(row) == 8]
    assert [[row[0], *row[3:7]] for row in modules] == FAMILIES[name]
    assert {row[2] for row in modules} == {"grouped_mm" if family(name).decorated else "own"}
    assert ("share their weights" in out) is (name == "diffusion_gemma")
    counted = {row[0].partition(" (")[0]: int(row[1].replace(",", "")) for row in rows(out) if row[0][:8] == "experts,"}
    if name == "gpt_oss":
        assert ["", "down_proj_bias", "4 x 32", "2 x 32", "held whole, added by one rank"] in rows(out)
    else:
        assert counted["experts, whole"] == 4 * counted["experts, on one rank"]


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: (model's config, arguments of `check`, what it says)
    "family": (
        {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"},
        {"etp_size": 2},
        "cannot split encoder.block.1.layer.1.mlp.experts (SwitchTransformersExperts): each expert is a module of",
    ),
    "etp": (
        MIXTRAL_8X7B,
        {"etp_size": 3, "gpus": 3},
        "expert_tensor_parallel.etp_size=3 cannot shard model.layers.0.mlp.experts: intermediate size 14336 is not",
    ),
    "ep": (
        MIXTRAL_8X7B,
        {"ep_size": 16, "gpus": 16},
        "expert_tensor_parallel.ep_size=16 cannot shard model.layers.0.mlp.experts: number of experts 8 is not",
    ),
    "cp": (
        TINY_MIXTRAL | {"intermediate_size": 64},
        {"gpus": 12, "axes": ["--cp", "3"]},
        "sequence parallel size=3 does not split attention: the model's 4 attention heads are not divisible by 3",
    ),
    "cp of latents": (
        DEEPSEEK_V3 | {"num_hidden_layers": 4},
        {"axes": ["--cp", "2"]},
        "sequence parallel size=2 does not split the attention of DeepseekV3ForCausalLM: Ulysses takes queries, keys",
    ),
    "pp": (
        TINY_MIXTRAL | {"intermediate_size": 64},
        {"gpus": 12, "axes": ["--pp", "3"]},
        "pipeline parallel size=3 is more than the model's 2 layers. Values that work: 1 to 2.",
    ),
    "dense": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1},
        {"etp_size": 2},
        "found no routed experts in LlamaForCausalLM",
    ),
    "unknown type": ({"model_type": "nonesuch"}, {}, "its config cannot be read: "),
    "no type": ({}, {}, "its config cannot be read: "),
    "broken": (MIXTRAL_8X7B | {"num_attention_heads": "many"}, {}, "'num_attention_heads' expected int, got str"),
    "impossible": (MIXTRAL_8X7B | {"hidden_act": "none"}, {}, "transformers cannot build it: "),
    "remote code": (
        {"model_type": "nonesuch", "auto_map": {"AutoConfig": "configuration.Config"}},
        {},
        "If you trust that code: --trust-remote-code.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, arguments, message = REFUSALS[case]
    sizes = {name: value for name, value in arguments.items() if name != "axes"}
    assert check(tmp_path, write_model(tmp_path, config), *arguments.get("axes", ()), **sizes) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_implementation_decides_on_alignment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = "etp 2 leaves 4 of 8 columns, 8 bytes a row"
    model = write_model(tmp_path, TINY_MIXTRAL)
    assert check(tmp_path, model, etp_size=2) == 0
    assert capsys.readouterr().out.count(warning) == 1
    assert check(tmp_path, model, "--experts-implementation", "eager", etp_size=2) == 0
    # 4 columns of fp32 are 16 bytes.
    assert check(tmp_path, write_model(tmp_path, TINY_MIXTRAL | {"torch_dtype": "float32"}), etp_size=2) == 0
    assert warning not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [("./none", "there is no file"), ("/none/at/all", "there is no file"), ("nobody/no-such-model", "cannot be read")],
)
def test_no_model(model: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests are offline: a model on the hub that isn't in the cache is out of reach."""
    assert check(tmp_path, model) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"--model {model}: ") and message in err and err.count("\n") == 1


def test_a_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, str(tmp_path)) == 2
    assert capsys.readouterr().err == f"--model {tmp_path}: there is no file {tmp_path / 'config.json'}.\n"


def test_a_plan_that_autotp_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables are printed all the same, with the style at fault; without tensor parallelism nobody asks for it."""
    model = write_model(tmp_path, {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"})
    assert check(tmp_path, model, tp=2, etp_size=2) == 2
    out, err = capsys.readouterr()
    assert ["layers.*.self_attn.o_proj", "rowwise_split_input: refused"] in rows(out)
    assert err.startswith("tensor_parallel.autotp_size=2 cannot split the dense layers of OlmoeForCausalLM")
    assert check(tmp_path, model, tp=1, etp_size=2) == 0


REMOTE = """
from transformers import MixtralConfig, MixtralForCausalLM

class OwnConfig(MixtralConfig):
    model_type = "nonesuch"

class OwnModel(MixtralForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.full
def test_remote_code_and_a_quiet_command(tmp_path: Path) -> None:
    """In a process of its own: transformers keeps such code in a cache, and the command says nothing but its tables."""
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = TINY_MIXTRAL | {"model_type": "nonesuch", "architectures": ["OwnModel"], "auto_map": auto_map}
    model = write_model(tmp_path, config)
    (tmp_path / "own.py").write_text(REMOTE, encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"expert_tensor_parallel": {"ep_size": 2}}', encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ds_etp.cli.main",
        "check",
        str(tmp_path / "ds.json"),
        "--gpus",
        "2",
        "--model",
        model,
    ]
    result = subprocess.run(
        [*command, "--trust-remote-code"],
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "OwnModel: routed experts" in result.stdout
    assert "[WARNING]" not in result.stdout + result.stderr


def test_without_a_model_torch_stays_out(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"expert_tensor_parallel": {}}', encoding="utf-8")
    code = (
        "import sys; from ds_etp.cli.main import main; main(['check', sys.argv[1], '--gpus', '2']); "
        "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ds.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ([3, 4, 5, 6], "{3..6}"),
        ([1, 3, 5, 7], "{1,3..7}"),
        ([0, 1], "{0..1}"),
        ([0, 4], "{0,4}"),
        ([0, 1, 2, 5, 7, 8], "{0..2,5,7..8}"),
    ],
)
def test_ranges(numbers: list[int], pattern: str) -> None:
    assert path_pattern(f"a.layers.{number}.b.0.experts" for number in numbers) == f"a.layers.{pattern}.b.0.experts"


def test_one_path_stays_itself() -> None:
    assert path_pattern(["model.layers.3.experts"]) == "model.layers.3.experts"
    assert path_pattern(["experts"]) == "experts"
