#!/bin/bash
# The load tests and checkpoints of docs/figures.md by name, one after the other, on a machine with vLLM and a GPU:
#   experiments/gpu_host.sh MODELS OUT JOB ...
# MODELS is a folder for checkpoints, OUT one for results and logs. A job that fails does not stop the next one.
# `soak` is 32 users for MINUTES (10) a side, plain and drafting; it needs the wheels of the extra `load` (locust) there.
set -u
here=$(cd "$(dirname "$0")" && pwd)
models=$1 out=$2
shift 2
mkdir -p "$models" "$out"
models=$(cd "$models" && pwd) out=$(cd "$out" && pwd)
export PYTHONPATH="$here/..:${PYTHONPATH:-}" PYTHONUNBUFFERED=1

table="1:4*0.747 46:2*0.656 91:2*0.895 182:2*0.948" # of the first run of load_on_gpu.py
early="--model ./reference_widened --layer 3 --k 4 --draft-weights int8 --adaptive"
smollm2="--model ./smollm2_widened --layer 30 --k 4 --draft-weights int8 --table 1:4"
load() { python3 "$here/serving/load_on_gpu.py" --out "$out/$job.json" "$@"; }
known() { load $early --table "$table" --every-length "$@"; }

run() {
    case $1 in
    widened) python3 "$here/reference_model/widen.py" --out reference_widened ;;
    smollm2) python3 "$here/ordinary_models/smollm2.py" --out smollm2 --widened smollm2_widened ;;
    host_time) python3 "$here/serving/host_time.py" --model "$here/reference_model/model" --requests 32 \
        --out "$out/host_time.txt" ;;
    lossless) python3 "$here/../tests/gpu/test_v2_lossless.py" --out "$out/lossless.json" ;;
    load_alone) load $early --gpus 2 --minutes 8 --table "$table" --groups closed,random,off ;;
    load_widened) known --clients 8,1,256,128,32,64 --period 5 --few-seconds 20 --minutes 25 --kv-gib 10 \
        --groups "closed,closed 32:3,closed 128:3,varying:4,poisson 30%,poisson 60%,bursts" --memory-share 0.26 ;;
    load_128) known --clients 256,128 --groups "closed 128:6" --minutes 25 --kv-gib 10 --memory-share 0.21 ;;
    load_rust) known --clients 8,1,256,128,32,64 --rust-frontend --few-seconds 20 --minutes 25 --kv-gib 10 \
        --groups "closed,closed 32:3,closed 128:6,poisson,bursts,random,off by table" --memory-share 0.21 ;;
    load_rust_measured) load $early --lengths-at 32,64,128,256 --clients 256,32,128,64 --rust-frontend --minutes 10.5 \
        --groups "lengths,closed:2,closed 256:3,closed 128:3,closed 32:4" --kv-gib 10 --memory-share 0.26 ;;
    load_rust_long) known --clients 256,128,32,64,8,1 --seconds 8 --rust-frontend --few-seconds 20 --minutes 26 --kv-gib 6 \
        --groups "closed 256@100,closed 128@100,closed@25,off,poisson@10,bursts@10,random" --memory-share 0.17 ;;
    load_python_long) known --clients 256,128 --groups "closed 128@100" --minutes 25 --kv-gib 6 --memory-share 0.17 ;;
    load_two_api_servers) known --clients 256,128 --groups "closed 128:3@20,closed 256@20" --api-servers 2 --minutes 12 \
        --kv-gib 6 --memory-share 0.17 ;;
    soak) python3 -m selfspec_cli load experiment=soak engine=h100 engine.max_num_seqs=32 model="$models/reference_widened" \
        model.name=reference_widened draft_weights=int8 load.seconds=$((60 * ${MINUTES:-10})) results_dir="$out/soak" ;;
    load_orders) load $smollm2 --groups closed --orders 32 --clients 8,1,32 --few-seconds 12 --minutes 18 --kv-gib 4 \
        --memory-share 0.15 ;;
    load_smollm2) load --model ./smollm2_widened --layer 8 --k 4 --adaptive --clients 128,1,32 --wanted 0.97 --seconds 8 \
        --few-seconds 8 --minutes 25 --kv-gib 4 --memory-share 0.12 --control --pin --table 1:4 \
        --groups "closed:2,closed 128:6" ;;
    esac
}

for job in "$@"; do
    grep -q "^    $job) " "$0" || { echo "$job: no such job; they are the cases of $0" >&2 && exit 2; }
done
cd "$models" || exit 1
for job in "$@"; do
    begun=$(date +%s)
    run "$job" >"$out/$job.log" 2>&1
    echo "$(date +%T) $job: exit code $?, $(($(date +%s) - begun)) s"
done
