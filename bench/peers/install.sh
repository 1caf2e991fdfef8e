#!/usr/bin/env bash
# install.sh HOME [peft] [openvino] [llama_cpp] [vllm]: creates a virtual environment for each named peer in HOME.
# Without names it installs all peers. If a peer cannot be installed, the script reports that and continues with the
# others; run.py reports the peer as not run.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${1:?"usage: install.sh HOME [peft] [openvino] [llama_cpp] [vllm]"}
shift
peers=("$@")
if [ ${#peers[@]} -eq 0 ]; then peers=(peft openvino llama_cpp vllm); fi
llama_cpp_python=0.3.36
mkdir -p "$home"
home=$(cd "$home" && pwd)

install() {
  local peer=$1 venv=$home/venv-$1
  [ -f "$venv/.installed" ] && return 0
  ${PYTHON:-python3} -m venv "$venv" || return 1
  # Install torch first, from pip's configured index; otherwise other packages would install torch with CUDA.
  if grep -q '^torch==' "$here/requirements/$peer.txt"; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$(grep '^torch==' "$here/requirements/$peer.txt")" || return 1
  fi
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements/$peer.txt" || return 1
  # Other packages install these for another version of torch, so that transformers or vLLM fail to import them.
  # No peer needs them.
  "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
  if [ "$peer" = llama_cpp ]; then build_llama_server "$venv" || return 1; fi
  touch "$venv/.installed"
}

build_llama_server() {
  local venv=$1 sources=$home/llama_cpp_python-$llama_cpp_python
  "$venv/bin/pip" install --quiet --disable-pip-version-check cmake ninja scikit-build-core || return 1
  if [ ! -d "$sources" ]; then
    "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary :all: --no-build-isolation \
      --dest "$home" "llama-cpp-python==$llama_cpp_python" || return 1
    tar -xzf "$home/llama_cpp_python-$llama_cpp_python.tar.gz" -C "$home" || return 1
  fi
  PATH="$venv/bin:$PATH" cmake -G Ninja -S "$sources/vendor/llama.cpp" -B "$home/llama-build" \
    -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF >/dev/null || return 1
  PATH="$venv/bin:$PATH" cmake --build "$home/llama-build" --target llama-server llama-quantize llama-perplexity
}

status=0
for peer in "${peers[@]}"; do
  if [ ! -f "$here/requirements/$peer.txt" ]; then
    echo "install.sh: no peer '$peer'; there are: peft openvino llama_cpp vllm" >&2
    exit 2
  fi
  if install "$peer"; then echo "$peer: installed"; else echo "$peer: could not be installed" >&2; status=1; fi
done
exit $status
