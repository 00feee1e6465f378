#!/usr/bin/env bash
# Runs the parity cases marked `compat` at the corners of the host range that setup.py claims, each in an environment of
# its own under .compat/, and those of adapters with older releases of PEFT, which lie before the newest environment's.
# By hand (`make compat`): it downloads three full environments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
CORNERS=(
    "0.19.5 5.15.0"
    "0.19.8 5.0.0"
)
NEWEST="0.19.8 5.24.0"
PEFTS=(0.18.1 0.19.1 0.20.0)
export OMP_NUM_THREADS=1

# The versions in question, and what depends on them: an older transformers wants an older tokenizers.
pins=$(grep -Ev '^(#|$|(deepspeed|transformers|tokenizers|datasets|matplotlib|ruff|mypy|trl)==)' requirements-dev.txt)
torch=$(grep '^torch==' <<<"$pins")

# Sets `env`: an environment with this DeepSpeed and this transformers, made where there is none.
make_environment() {
    local deepspeed=$1 transformers=$2
    env=.compat/deepspeed-$deepspeed-transformers-$transformers
    echo "== deepspeed $deepspeed, transformers $transformers"
    if [ ! -e "$env/.installed" ]; then
        rm -rf "$env"
        "$PYTHON" -m venv "$env"
        "$env/bin/python" -m pip install "$torch"
        # shellcheck disable=SC2086  # one word for each requirement
        "$env/bin/python" -m pip install $pins "deepspeed==$deepspeed" "transformers==$transformers"
        touch "$env/.installed"
    fi
    # DeepSpeed's CPU collectives, in one process: see the Makefile.
    PATH="$PWD/$env/bin:$PATH" TORCH_EXTENSIONS_DIR="$PWD/$env/torch_extensions" \
        "$env/bin/python" -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()'
}

for corner in "${CORNERS[@]}"; do
    # shellcheck disable=SC2086  # two words
    make_environment $corner
    # Which of the functions that ds_etp patches are there as it knows them.
    PATH="$PWD/$env/bin:$PATH" PYTHONPATH="$PWD" "$env/bin/python" -m ds_etp.patches.signatures
    # The package comes from the checkout: `python -m pytest` puts the working directory on the path, which PYTHONPATH
    # hands on to the ranks that the tests start. PATH has the ninja that DeepSpeed compiles with.
    PATH="$PWD/$env/bin:$PATH" PYTHONPATH="$PWD" TORCH_EXTENSIONS_DIR="$PWD/$env/torch_extensions" \
        "$env/bin/python" -m pytest tests/parity -m compat --full
done

# shellcheck disable=SC2086  # two words
make_environment $NEWEST
for peft in "${PEFTS[@]}"; do
    echo "== peft $peft"
    folder=.compat/peft-$peft
    [ -e "$folder" ] || "$env/bin/python" -m pip install --no-deps --target "$folder" "peft==$peft"
    PATH="$PWD/$env/bin:$PATH" PYTHONPATH="$PWD/$folder:$PWD" TORCH_EXTENSIONS_DIR="$PWD/$env/torch_extensions" \
        "$env/bin/python" -m pytest tests/peft -m compat --full
done
