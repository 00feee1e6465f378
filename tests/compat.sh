#!/usr/bin/env bash
# Runs the cases marked `compat` at the corners of the host range that setup.py claims, and those of adapters with older
# releases of PEFT. By hand (`make compat`): it downloads a torch for each corner of torch's range, CUDA builds that run on
# the CPU here, gigabytes each.
#
#   tests/compat.sh                                    all of it
#   tests/compat.sh "2.9.0 0.19.8 5.24.0"              one corner: torch, DeepSpeed, transformers [, python]
#
# An environment holds a torch and the pins of requirements-dev.txt; another DeepSpeed, transformers or PEFT lies before
# the environment's on the path. COMPAT names the folder for all of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
COMPAT=${COMPAT:-$PWD/.compat}
CORNERS=(
    "2.9.0 0.19.8 5.24.0"
    "2.14.1 0.19.8 5.25.0"
    "2.13.0 0.18.6 5.24.0"
    "2.13.0 0.19.0 5.24.0"
    "2.13.0 0.19.5 5.15.0"
    "2.13.0 0.19.8 5.0.0"
    "2.9.0 0.19.8 5.20.2 python3.10" # the newest transformers that Python 3.10 has
)
NEWEST="2.13.0 0.19.8 5.24.0"
PEFTS=(0.18.1 0.19.1 0.20.0)
# Each file is named: what the others import isn't in these environments.
CASES=(tests/parity tests/parallel/test_group_calls.py tests/checkpoint/test_reshard.py tests/export/test_live.py
    tests/trainer/test_trainer.py tests/sequence)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

# What is of no use here, and what a corner names itself.
pins() { grep -Ev '^(#|$|(torch|deepspeed|transformers|tokenizers|datasets|matplotlib|ruff|mypy|trl)==)' requirements-dev.txt; }

# Sets `env`: an environment with this torch and the newest of the rest, made where there is none.
make_environment() {
    local torch=$1 python=$2 name requirements
    name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    env=$COMPAT/torch-$torch-$name
    [ -e "$env/.installed" ] && return
    rm -rf "$env"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install "torch==$torch"
    requirements=$(pins)
    # The pins are those of another Python: the newest of each that this one has.
    [ "$name" = python3.10 ] && requirements=$(sed 's/==.*//' <<<"$requirements")
    # DeepSpeed's build looks at the torch that is installed, and asks for no other.
    # shellcheck disable=SC2086  # one word for each requirement
    "$env/bin/python" -m pip install $requirements "torch==$torch" wheel
    "$env/bin/python" -m pip install --no-build-isolation "torch==$torch" deepspeed transformers
    touch "$env/.installed"
}

# Prints a folder with one release of a package, made where there is none: `lay_over NAME VERSION [pip's arguments]`.
lay_over() {
    local package=$1 release=$2 folder
    shift 2
    folder=$env/over/$package-$release
    if [ ! -e "$folder/.installed" ]; then
        rm -rf "$folder"
        "$env/bin/python" -m pip install --target "$folder" "$@" "$package==$release" >&2
        touch "$folder/.installed"
    fi
    printf '%s' "$folder"
}

# Sets `env` and `path`: torch, DeepSpeed, transformers and python of a corner.
make_corner() {
    local torch=$1 deepspeed=$2 transformers=$3 python=${4:-$PYTHON} folder
    echo "== torch $torch, deepspeed $deepspeed, transformers $transformers, $("$python" --version)"
    make_environment "$torch" "$python"
    # With what it depends on: an older transformers wants an older tokenizers.
    path=$(lay_over transformers "$transformers")
    folder=$(lay_over deepspeed "$deepspeed" --no-deps --no-build-isolation)
    # The package comes from the checkout: PYTHONPATH hands it on to the ranks that the tests start.
    path=$folder:$path:$PWD
    # DeepSpeed's CPU collectives, in one process: see the Makefile.
    extensions=$env/torch_extensions/deepspeed-$deepspeed
    within -c 'from deepspeed.comm.torch import build_shm_op; build_shm_op()'
}

# PATH has the ninja that DeepSpeed compiles with.
within() { PATH="$env/bin:$PATH" PYTHONPATH="$path" TORCH_EXTENSIONS_DIR="$extensions" "$env/bin/python" "$@"; }

run_corner() {
    # shellcheck disable=SC2086  # several words
    make_corner $1
    # Which of the functions that ds_etp patches are there as it knows them.
    within -m ds_etp.patches.signatures >"$env/signatures" || { grep DIFFERS "$env/signatures"; return 1; }
    within -m pytest "${CASES[@]}" -m compat --full
}

if [ $# -gt 0 ]; then
    for corner in "$@"; do
        run_corner "$corner"
    done
    exit
fi

for corner in "${CORNERS[@]}"; do
    read -r _ _ _ python <<<"$corner"
    if ! "${python:-$PYTHON}" --version >/dev/null; then
        echo "no $python here: left out $corner"
        continue
    fi
    run_corner "$corner"
done

# shellcheck disable=SC2086  # several words
make_corner $NEWEST
others=$path
for peft in "${PEFTS[@]}"; do
    echo "== peft $peft"
    path=$(lay_over peft "$peft" --no-deps):$others
    within -m pytest tests/peft -m compat --full
done
