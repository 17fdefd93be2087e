#!/usr/bin/env bash
# What mending buys a checkpoint, beside its rivals, on one GPU: all contenders side by side, each a process.
#
#     tools/mending_results.sh CHECKPOINT DATA STEPS OUT [--texts NAME=TEXT ...] [more flags of benchmarks/mending.py run]
#     tools/mending_results.sh CHECKPOINT DATA 4 OUT --device cpu --precision fp32 --batches 1    # to check that it runs
#
# SEEDS="0 1 2" fine-tunes each contender with these seeds. It can be killed and started again: contenders that are
# finished are not measured again, and one that was training goes on. OUT.json joins the results.
set -euo pipefail
checkpoint=$1 data=$2 steps=$3 out=$4
shift 4
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$out/logs"

contend() { # NAME STEPS FLAGS...
    local name=$1 length=$2
    shift 2
    [ -e "$out/$name.json" ] && return
    "$python" "$here/../benchmarks/mending.py" run "$name" "$out" --checkpoint "$checkpoint" --data "$data" \
        --steps "$length" "$@" > "$out/logs/$name.log" 2>&1 || echo "failed: $out/logs/$name.log" >&2
}

gates='gated(gate=element, predictor=features)'
contend as-it-came 0 "$@" # alone: it also cuts and keeps the data
for seed in ${SEEDS:-0}; do
    contend "plain-$seed" "$steps" --plain --seed "$seed" "$@" &
    contend "penalty-$seed" "$steps" --seed "$seed" "$@" &
    contend "penalty-range-$seed" "$steps" --penalty-kind excess_range --seed "$seed" "$@" &
    contend "gates-penalty-$seed" "$steps" --method "$gates" --seed "$seed" "$@" &
    contend "gates-norm-penalty-$seed" "$steps" --method "${gates%)}, qk_norm=rms)" --seed "$seed" "$@" &
    contend "sinks-penalty-$seed" "$steps" --method 'outeffhop(sink=learned)' --seed "$seed" "$@" &
done
wait
"$python" "$here/../benchmarks/mending.py" collect "$out" --result "$out.json"
