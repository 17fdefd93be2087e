#!/usr/bin/env bash
# The paper's tables and figures at small scale on one GPU, many runs side by side:
#
#     tools/small_results.sh DATA OUT
#     tools/small_results.sh DATA OUT --device cpu --quick    # to see that it runs
#
# DATA holds prose/ (text files), cifar10/ (npz), ett/ETTh1.csv; OUT is where results go, such as results/small.
# It can be killed and started again: finished cells are not run again.
#
# Small models start kernels faster than the GPU is filled by them; several processes fill it. With NVIDIA's MPS
# their kernels run at the same time. The large models are kept from a part of the GPU, so that the kernels of
# STanHop-Net, tiny and a thousand a step, need not wait for theirs. (What that gains has not been measured.)
set -euo pipefail
data=$(realpath "$1") out=$2 logs=$2/logs
options=("${@:3}")
[ ${#options[@]} -gt 0 ] || options=(--device cuda)
mkdir -p "$logs"
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2

reproduce() { # LOG WORKERS EXPERIMENT SEEDS CELLS...
    local log=$1 workers=$2 experiment=$3 seeds=$4
    shift 4
    "$python" -m outeffhop reproduce "$experiment" --scale small --data "$data" --out "$out" "${options[@]}" \
        --seeds "$seeds" --workers "$workers" --only "$@" >> "$logs/$log.log" 2>&1 || echo "$log failed: $logs/$log.log" >&2
}

reproduce cost 1 cost 1 '*' # alone: it measures time
# tokenised once, or each process would do it for itself
OMP_NUM_THREADS=$(nproc --all) "$python" -m outeffhop train --model opt --preset small --data "$data/prose" \
    --out "$logs/none" --dry-run > "$logs/tokens.log" 2>&1
if command -v nvidia-cuda-mps-control > /dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

(
    reproduce stanhop 6 table1 1 'stanhop-*'
    reproduce table2 8 table2 1 'ETTh1-*'
) &
export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=85
(
    reproduce vit 3 table1 1 'vit-*'
    reproduce convergence 3 convergence 1 '*'
) &
reproduce bert 3 table1 1 'bert-*' &
(
    reproduce opt 3 table1 1 'opt-*'
    reproduce opt 4 table1 3 'opt-vanilla-*' 'opt-outeffhop-*'
    reproduce beyond 3 beyond 1 '*'
) &
while [ "$(jobs -r | wc -l)" -gt 0 ]; do
    echo "$(date +%T) $(find "$out" -path '*cells/*.json' | wc -l) cells"
    sleep "${EVERY:-60}"
done
wait
# once more from all cells there are now: what ran first did not know of the rest
reproduce table1 1 table1 3 'opt-vanilla-0'
reproduce training-outliers 1 training-outliers 1 '*'
echo "done: $out/report.html"
