#!/bin/bash
# Acceptance of every view and width, and what each stage of fitting adds, on SmolLM2 and on the reference model.
#   experiments/views/measure.sh SMOLLM2_FOLDER OUT_FOLDER [ENGINE]
# ENGINE is h100 (one GPU) unless it is named; with cpu it takes hours on two cores. Rows are written as they are found,
# so a part that was cut off leaves what it had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
smollm2=$1 out=$2 engine=${3:-h100}
heads=$out/fitted
kinds="int8;int4;fp8"
python3=${PYTHON:-python3}
mkdir -p "$out"
accept() { $python3 "$here/acceptance.py" "$@"; }
file() { echo "$heads"/*/"weights-$1.safetensors"; }

# 1. Weights rounded to nearest, skipped layers, and early exit.
accept --model "$smollm2" --name smollm2_135m --answers 16 --out "$out/smollm2_views.csv" \
    --views "$kinds;14-16;18-20;int8@14-16;int4@14-16;shared@22-29;shared@8-29"
accept --model "$here/../reference_model/model" --name reference --prompts library --answers 32 \
    --out "$out/reference_views.csv" --views "$kinds;12-17;12-13;int4@12-13;shared@3-23;shared@6-23"

# 2. 4-bit copies rounded with data.
dtype=$([ "$engine" = cpu ] && echo float32 || echo bfloat16)
$python3 -m selfspec_cli fit-weights model="$smollm2" model.name=smollm2_135m model.dtype=$dtype model.max_model_len=1024 \
    engine="$engine" engine.kv_cache_gib=2 engine.max_num_seqs=32 workload=chat draft_weights=int4 head_dir="$heads" \
    results_dir="$out/runs" --prompts 32
accept --model "$smollm2" --name smollm2_135m --answers 16 --out "$out/smollm2_fitted.csv" --views "int4=$(file int4)"

# 3. The engine's own count for some of them, and the search for layers.
$python3 -m selfspec_cli views model="$smollm2" model.name=smollm2_135m model.dtype=$dtype model.max_model_len=1024 \
    engine="$engine" engine.kv_cache_gib=2 engine.max_num_seqs=32 workload=chat k=4 perplexity_tokens=0 layer=30 \
    draft_weights=int8,int4 results_dir="$out/engine" --drop 6
