# Sourced by take.sh, prep.sh, lane.sh and poll.sh: what lies where on the host, and what more than one of them does.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=${ROOT:-/opt/selfspec}
WAIT=${WAIT:-1500} # seconds until something that has not come counts as missing
export ROOT WAIT
stage=$ROOT/stage tree=$ROOT/tree models=$ROOT/models out=$ROOT/out site=$ROOT/site vllm=$ROOT/vllm state=$ROOT/state
lanes=$out/lanes
mkdir -p "$stage" "$models" "$lanes" "$state/seen"

say() { echo "$(date +%T) $*"; }

# A step of prep.sh leaves ready.NAME or failed.NAME.
made() { # made NAME: waits for the step, and tells whether it succeeded
    local tries=0
    until [ -e "$state/ready.$1" ]; do
        if [ -e "$state/failed.$1" ] || [ "$tries" -ge "$WAIT" ]; then return 1; fi
        tries=$((tries + 1))
        sleep 1
    done
}

use_packages() { # what engines need on the path; a vLLM that came along goes before the host's
    PYTHONPATH=$site
    if [ -d "$vllm" ]; then PYTHONPATH=$site:$vllm; fi
    # There is no network, and FlashInfer's sampler would have to be compiled first.
    export PYTHONPATH HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
}

release() { # lets the lanes go on that a process stopped which died before it could do so; not while one is timed
    flock -n "$lanes/timed" python3 "$here/alone/lanes.py" release "$lanes"
}
