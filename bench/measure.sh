#!/usr/bin/env bash
# measure.sh HOME [0.5b|40m] [PART...]: measures everything in docs/performance.md. See bench/README.md.
# Parts: install, bench, peers, fill; default: all. Each part uses the results of the earlier ones in HOME.
#   REPEATS=5       number of rounds of bench and of peers
#   BENCH_ARGS=     additional arguments for run.py, such as --only NAME...
#   PEERS_ARGS=     additional arguments for peers/run.py, such as --rows NAME... or --peers NAME...
#   PYTHON_BIN=     a Python with AdaptRT installed; default: that of .venv
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
home=${1:?"usage: measure.sh HOME [0.5b|40m] [install] [bench] [peers] [fill]"}
model=${2:-0.5b}
parts=("${@:3}")
if [ ${#parts[@]} -eq 0 ]; then parts=(install bench peers fill); fi
mkdir -p "$home/plots" "$home/bench"
home=$(cd "$home" && pwd)
python=${PYTHON_BIN:-$root/.venv/bin/python}
repeats=${REPEATS:-5}
read -ra bench_args <<<"${BENCH_ARGS:-}"
read -ra peers_args <<<"${PEERS_ARGS:-}"
# Change the directory, so that Python imports the installed package and not the checkout.
cd "$home"

install() {
  make -C "$root" install
  "$python" -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.8' 'pydantic>=2.7' "tomli>=2; python_version < '3.11'"
  "$here/peers/install.sh" "$home" || echo "measure.sh: going on with the peers that are there" >&2
}

bench() {
  local scenarios=default
  if [ "$model" = 40m ]; then scenarios=quick; fi
  # Delete engines of earlier builds of AdaptRT.
  rm -rf "$home"/bench/engine-*
  "$python" "$here/run.py" "$scenarios" --work_dir "$home/bench" --repeats "$repeats" \
    --output "$home/bench.json" --plots "$home/plots" "${bench_args[@]}"
}

peers() {
  rm -rf "$home/models/$model"/adaptrt-*
  "$python" "$here/peers/run.py" --home "$home" --model "$model" --repeats "$repeats" \
    --output "$home/peers.json" --plot "$home/plots/peers.png" "${peers_args[@]}"
}

fill() {
  local reports=()
  if [ -f "$home/bench.json" ]; then reports+=(--bench "$home/bench.json"); fi
  if [ -f "$home/peers.json" ]; then reports+=(--peers "$home/peers.json"); fi
  "$python" "$here/fill_performance.py" "$root/docs/performance.md" "${reports[@]}"
}

failed=0
for part in "${parts[@]}"; do
  case $part in
    install | bench | peers | fill) ;;
    *) echo "measure.sh: no part '$part'; there are: install bench peers fill" >&2; exit 2 ;;
  esac
done
for part in "${parts[@]}"; do
  echo "measure.sh: $part, $(date -u +%H:%M:%S)"
  # If a part fails, continue with the next one.
  set +e
  (set -e; "$part")
  status=$?
  set -e
  if [ $status -ne 0 ]; then echo "measure.sh: $part failed" >&2; failed=1; fi
done
exit $failed
