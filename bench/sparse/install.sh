#!/usr/bin/env bash
# install.sh HOME: PowerInfer built for this machine's CPU in HOME/powerinfer, and what its converter imports in HOME/venv-powerinfer.
# A checkout that is there already is built as it is.
set -euo pipefail
home=${1:?"usage: install.sh HOME"}
commit=d3ebd7c5666348cf43c22f0d62dfbc9a763cffb8
mkdir -p "$home"
[ -d "$home/powerinfer" ] || {
  git clone --no-checkout https://github.com/SJTU-IPADS/PowerInfer "$home/powerinfer"
  git -C "$home/powerinfer" checkout "$commit"
}
cmake -S "$home/powerinfer" -B "$home/powerinfer/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_NATIVE=ON >/dev/null
cmake --build "$home/powerinfer/build" --target server --parallel "$(nproc)"
[ -d "$home/venv-powerinfer" ] || ${PYTHON:-python3} -m venv "$home/venv-powerinfer"
# Its converter calls what NumPy 2 has no longer.
"$home/venv-powerinfer/bin/pip" install --quiet --disable-pip-version-check 'numpy<2' sentencepiece 'transformers>=4.33'
