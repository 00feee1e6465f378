"""Package metadata. Settings of the development tools are in pyproject.toml."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent


def tested(constant: str) -> str:
    """A version from ds_etp/patches/versions.py, read as text: importing it would need the host libraries."""
    text = (ROOT / "ds_etp" / "patches" / "versions.py").read_text(encoding="utf-8")
    found = re.search(rf'^{constant}\s*(?::[^=]*)?=\s*"([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"ds_etp/patches/versions.py has no {constant}")
    return found.group(1)


def up_to_patches_of(version: str) -> str:
    """An upper bound that takes every patch release of `version`: "5.24" gives "<5.25"."""
    major, minor = version.split(".")[:2]
    return f"<{major}.{int(minor) + 1}"


def pinned() -> list[str]:
    """The requirements of the development environment; a source archive carries none."""
    file = ROOT / "requirements-dev.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


STARTUP = "ds_etp.pth"  # read at every start of an interpreter, from the folder that packages are installed in


class BuildWithStartup(build_py):
    """Puts the .pth file beside the packages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copy(ROOT / STARTUP, Path(self.build_lib) / STARTUP)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / STARTUP)]


class EditableWithStartup(editable_wheel):
    """The same for `pip install -e`, whose wheel holds no packages: at the step in which it is filled."""

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        super()._install_namespaces(installation_dir, pth_prefix)
        shutil.copy(ROOT / STARTUP, Path(installation_dir) / STARTUP)


setup(
    name="ds-etp",
    version="0.1.0",
    description="Expert tensor parallelism for Hugging Face mixture-of-experts models under DeepSpeed",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    cmdclass={"build_py": BuildWithStartup, "editable_wheel": EditableWithStartup},
    packages=find_packages(include=["ds_etp", "ds_etp.*"]),
    install_requires=[
        # Ranges that were run: in `make test` the pins of requirements-dev.txt, in `make compat` both ends of each.
        f"torch>={tested('TORCH_MIN')},{up_to_patches_of(tested('TORCH_MAX'))}",
        # In these two ZeRO 1 and 2 fail at the first step.
        f"deepspeed>={tested('DEEPSPEED_MIN')},!=0.18.8,!=0.18.9,<={tested('DEEPSPEED_MAX')}",
        f"transformers>={tested('TRANSFORMERS_MIN')},{up_to_patches_of(tested('TRANSFORMERS_MAX'))}",
        "packaging",
        "pydantic>=2",
        "rich",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "dev": pinned(),
        "chart": ["matplotlib"],  # ds-etp plan --chart, ds-etp report
        "peft": [f"peft>={tested('PEFT_MIN')},{up_to_patches_of(tested('PEFT_MAX'))}"],
        "examples": ["accelerate", "datasets", "matplotlib", "tokenizers", "tqdm"],
    },
    entry_points={"console_scripts": ["ds-etp = ds_etp.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
