#!/usr/bin/env bash
# The paper's tables and figures at small scale on one GPU, with many runs in parallel:
#
#     tools/small_results.sh DATA OUT
#     tools/small_results.sh DATA OUT --device cpu --quick    # to check that it runs
#
# DATA holds prose/ (text files), cifar10/ (npz), ett/ (ETTh1.csv, ETTm1.csv) and wth/ (WTH.csv); OUT is where results
# go, such as results/small.
# It can be killed and started again: finished cells are not measured again.
#
# Every cell is a process, and every kind of model has its queue: small models do not fill the GPU, and only BERT and OPT
# are limited by it. NVIDIA's MPS runs kernels of several processes at the same time. Two of its settings are not used:
# on an H200, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=85 made BERT and OPT non-finite from their second step on, with any method,
# and CUDA_MPS_CLIENT_PRIORITY=1 cut BERT's tokens per second to a third (results/small/tried.json).
set -euo pipefail
data=$(realpath "$1") out=$2
options=${*:3}
export data out logs=$out/logs options=${options:---device cuda} python=${PYTHON:-python}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2
mkdir -p "$logs"

cell() { # EXPERIMENT SEEDS CELL...
    local log=$logs/$1-$3.log
    # shellcheck disable=SC2086
    "$python" -m outeffhop reproduce "$1" --scale small --data "$data" --out "$out" $options --seeds "$2" \
        --only "${@:3}" > "${log//\*/all}" 2>&1 || echo "failed: ${log//\*/all}" >&2
}
export -f cell
queue() { # PROCESSES; lines of EXPERIMENT SEEDS CELL
    xargs -P "$1" -L 1 bash -c 'cell "$@"' _
}

cell cost 1 '*' # before everything else: it measures time
if [[ $options == *cuda* ]] && command -v nvidia-cuda-mps-control > /dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

methods="outeffhop vanilla gated-outeffhop gated clipped-outeffhop clipped"
queue "${STANHOP:-5}" < <(
    printf 'table1 1 stanhop-%s-0\n' $methods
    for seed in 0 1 2; do
        for layers in gsh outeffhop vanilla sparse; do # the longest first
            printf "table2 3 %s-$layers-$seed\n" {ETTh1,WTH}-{24,48,168,336,720} ETTm1-{24,48,96,288,672}
        done
    done
    printf 'table1 3 stanhop-outeffhop-%s\ntable1 3 stanhop-vanilla-%s\n' 1 1 2 2
) &
queue "${VIT:-3}" < <(
    printf 'table1 1 vit-%s-0\n' $methods
    printf 'convergence 1 %s-0\n' outeffhop sparse vanilla
    printf 'table1 3 vit-outeffhop-%s\ntable1 3 vit-vanilla-%s\n' 1 1 2 2
) &
(
    # tokenize once, or every process would do it
    "$python" -m outeffhop train --model opt --preset small --data "$data/prose" --out "$logs/none" --dry-run \
        > "$logs/tokens.log" 2>&1
    queue "${BERT:-6}" < <(
        printf 'table1 1 bert-%s-0\n' $methods
        printf 'table1 3 bert-outeffhop-%s\ntable1 3 bert-vanilla-%s\n' 1 1 2 2
    ) &
    queue "${OPT:-5}" < <(
        printf 'table1 3 opt-outeffhop-%s\ntable1 3 opt-vanilla-%s\n' 0 0 1 1 2 2
        printf 'table1 1 opt-%s-0\n' gated-outeffhop gated clipped-outeffhop clipped
        # the last three are runs of table1, which must have finished: only one process may use a run's folder
        printf 'beyond 1 %s-0\n' {vanilla,outeffhop}-qk_norm-rms gated-outeffhop-predictor-features \
            gated-outeffhop-gate-element-predictor-features{,-qk_norm-rms} \
            {vanilla,outeffhop,gated-outeffhop-gate-element-predictor-features}-penalty \
            outeffhop-sink-learned{,-qk_norm-rms} gated-gate-element-predictor-features-qk_norm-rms \
            gated-outeffhop-sink-learned-gate-element-predictor-features-qk_norm-rms vanilla outeffhop gated-outeffhop
    ) &
    wait
) &
while [ "$(jobs -r | wc -l)" -gt 0 ]; do
    echo "$(date +%T) $(cat "$out"/*.json 2> /dev/null | grep -c '"asked":') cells"
    sleep "${EVERY:-60}"
done
wait
# draw the results again from all cells: those that finished early did not include the later ones
cell table1 3 'opt-vanilla-*'
cell table2 3 'ETTh1-24-*-0'
cell beyond 1 'vanilla-0'
cell convergence 1 'vanilla-0'
cell training-outliers 3 '*-0' {bert,opt,vit,stanhop}-{vanilla,outeffhop}-'*'
echo "done: $out/report.html"
