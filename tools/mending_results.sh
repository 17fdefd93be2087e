#!/usr/bin/env bash
# What mending buys a checkpoint, beside its rivals, on one GPU: all contenders side by side, each a process.
#
#     tools/mending_results.sh CHECKPOINT DATA STEPS OUT [--texts NAME=TEXT ...] [more flags of benchmarks/mending.py run]
#     tools/mending_results.sh CHECKPOINT DATA 4 OUT --device cpu --precision fp32 --batches 1    # to check that it runs
#
# SEEDS="0 1 2" fine-tunes each contender with these seeds, and ONLY="plain range" leaves the others out. It can be
# killed and started again: contenders that are finished are not measured again, and one that was training goes on.
# OUT.json joins the results.
set -euo pipefail
checkpoint=$1 data=$2 steps=$3 out=$4
shift 4
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$out/logs"

run() { # NAME FLAGS...
    "$python" "$here/../benchmarks/mending.py" run "$1" "$out" --checkpoint "$checkpoint" --data "$data" "${@:2}" \
        > "$out/logs/$1.log" 2>&1 || echo "failed: $out/logs/$1.log" >&2
}
contend() { # KIND SEED FLAGS...
    [[ " ${ONLY:-$1} " == *" $1 "* ]] || return 0
    [ -e "$out/$1-$2.json" ] || run "$1-$2" --steps "$steps" --seed "$2" "${@:3}"
}

gates='gated(gate=element, predictor=features, qk_norm=rms)'
run cut --cut "$@"
[ -e "$out/as-it-came.json" ] || run as-it-came --steps 0 "$@" &
for seed in ${SEEDS:-0}; do
    contend plain "$seed" --plain "$@" &
    contend tail "$seed" --penalty-kind log_tail "$@" &
    contend range "$seed" --penalty-kind excess_range "$@" &
    contend range-light "$seed" --penalty-kind excess_range --penalty 0.005 "$@" &
    contend size "$seed" --penalty-kind excess_size "$@" &
    contend gates-range "$seed" --penalty-kind excess_range --method "$gates" "$@" &
    contend sinks-range "$seed" --penalty-kind excess_range --method 'outeffhop(sink=learned)' "$@" &
done
wait
"$python" "$here/../benchmarks/mending.py" collect "$out" --result "$out.json"
