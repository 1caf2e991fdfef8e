#!/usr/bin/env bash
# measure.sh HOME [0.5b|40m]: everything that docs/performance.md reports, in one go. See bench/README.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
home=${1:?"usage: measure.sh HOME [0.5b|40m]"}
model=${2:-0.5b}
mkdir -p "$home"
home=$(cd "$home" && pwd)
python=$root/.venv/bin/python

make -C "$root" install
"$python" -m pip install --quiet --disable-pip-version-check 'matplotlib>=3.8'
"$here/peers/install.sh" "$home" || echo "measure.sh: going on with the peers that are there" >&2

# The package is imported from .venv, not from the checkout.
cd "$home"
scenarios=default
if [ "$model" = 40m ]; then scenarios=quick; fi
"$python" -m adaptrt.builder.cli bench "$scenarios" --work_dir "$home/bench" --output "$home/bench.json" --plots "$home/plots"
"$python" "$here/peers/run.py" --home "$home" --model "$model" --output "$home/peers.json" --plot "$home/plots/peers.png"
"$python" "$here/fill_performance.py" --bench "$home/bench.json" --peers "$home/peers.json" "$root/docs/performance.md"
