#!/bin/bash
# On the host:   bash experiments/offline_host/poll.sh SECONDS
# Prints what is new in the logs until the lanes (or prep.sh, before there is a lane) are done or SECONDS have passed.
# Then it packs the results into the folder OUT as out.tar.xz, or in parts of 15 MiB: cat out.tar.xz.* | tar xJ
set -u
. "$(dirname "$0")/common.sh"
limit=${1:-300} begun=$(date +%s) back=${OUT:-$ROOT/back}
mkdir -p "$back"
shopt -s nullglob

news() { # the new lines of prep.sh and the lanes
    local file seen had have
    for file in "$out"/prep.log "$out"/lane-*.log; do
        seen=$state/seen/$(basename "$file")
        had=$(cat "$seen" 2>/dev/null || echo 0) have=$(wc -l <"$file")
        if [ "$have" -gt "$had" ]; then sed -n "$((had + 1)),${have}p" "$file" | cut -c1-200; fi
        echo "$have" >"$seen"
    done
}

tails() { # the last line of every other log that has changed
    local file seen line
    for file in "$out"/*.log; do
        case $(basename "$file") in prep* | lane-*) continue ;; esac
        seen=$state/seen/$(basename "$file")
        line=$(tail -c 3000 "$file" | tr '\r' '\n' | sed 's/\x1b\[[0-9;?]*[A-Za-z]//g' | # without colours and cursors
            grep -a '[^[:space:]]' | tail -n 1)
        if [ "$line" = "$(cat "$seen" 2>/dev/null)" ]; then continue; fi
        echo "$line" >"$seen"
        say "$(basename "$file" .log) | ${line:0:160}"
    done
}

finished() {
    local lock locks=("$state"/lane-*.lock)
    if [ ${#locks[@]} = 0 ]; then locks=("$state/prep.lock"); fi
    for lock in "${locks[@]}"; do flock -n "$lock" true || return 1; done
}

failures() { # the end of the log of every job that failed, once
    local job
    for job in $(sed -nE 's/.* ([a-z0-9_]+): exit code [1-9].*/\1/p' "$out"/lane-*.log /dev/null | sort -u); do
        if [ -e "$state/seen/$job.told" ]; then continue; fi
        touch "$state/seen/$job.told"
        echo "---- the end of $job.log"
        tail -n 25 "$out/$job.log" | cut -c1-220
    done
}

pack() { # results and logs, without models, caches and large files; nice, because a lane may be timed
    cd "$out" || return
    find . -type d \( -name '*cache*' -o -name __pycache__ \) -prune -o \
        -type f -size -12M ! -name '*.safetensors' ! -name '*.bin' ! -name '*.pt' -print0 |
        tar c --null -T - --ignore-failed-read 2>/dev/null | nice -n 19 xz -T2 >"$ROOT/out.tar.xz"
    find . -type f \( -size +12M -o -name '*.safetensors' \) -printf 'not packed: %p, %s bytes\n' | head -n 20
    rm -f "$back"/out.tar.xz*
    if [ "$(stat -c %s "$ROOT/out.tar.xz")" -le $((15 << 20)) ]; then
        cp "$ROOT/out.tar.xz" "$back/"
    else
        split -b 15M -d -a 1 "$ROOT/out.tar.xz" "$back/out.tar.xz."
    fi
}

sleep 1 # prep.sh takes its lock
round=0
while :; do
    release
    news
    if [ $((round % 10)) = 5 ]; then tails; fi
    if finished; then break; fi
    if [ $(($(date +%s) - begun)) -ge "$limit" ]; then say "$limit s have passed" && break; fi
    round=$((round + 1))
    sleep 3
done
news
tails
failures
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader 2>/dev/null
df -h "$ROOT" | tail -n 1
pack
