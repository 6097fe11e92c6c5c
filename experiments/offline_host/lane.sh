#!/bin/bash
# On the host:   bash experiments/offline_host/lane.sh NAME JOB ...
# Runs jobs of gpu_host.sh in the background, one after the other; lanes of other names run beside it. Each job waits
# for what prep.sh makes for it. Jobs that are given to a lane that still runs wait for its end.
# lane.sh --needs JOB prints what a job waits for.
set -u
. "$(dirname "$0")/common.sh"
jobs_file=$here/../gpu_host.sh

is_job() { sed -n 's/^\([a-z0-9_]*\)() {.*/\1/p' "$jobs_file" | grep -v '^selfspec$' | grep -qxF -- "$1"; }

words() { # the text of a job's function, and the settings that it names by a variable
    local text name
    text=$(awk -v begin="$1() {" 'index($0, begin) == 1 {on = 1} on {print} on && /^([a-z].*)?}$/ {exit}' "$jobs_file")
    echo "$text"
    for name in $(grep -oE '\$[a-z]+' <<<"$text" | sort -u); do grep -E "^${name#?}=" "$jobs_file"; done
}

needs() { # the steps of prep.sh that make what a job uses
    local model
    echo site vllm
    # shellcheck disable=SC2016 # a word of the job
    if words "$1" | grep -v '^views=' | grep -qE 'reference_model/|\$plain'; then echo weights; fi
    if words "$1" | grep -q -- '--join pieces'; then echo pieces; fi
    if words "$1" | grep -q -- '--rust-frontend'; then echo frontend; fi
    for model in $(words "$1" | grep -oE -- '(model=\./|--model (\./)?)[a-z0-9_]+' | sed 's|.*[/ =]||' | sort -u); do
        case $model in
            smollm2 | smollm2_widened) echo smollm2 ;;
            smollm2_widened_drafts) echo smollm2_draft ;;
            *) echo "$model" ;;
        esac
    done
}

run_job() (
    use_packages
    export PYTHONPATH=$here/alone:$PYTHONPATH SELFSPEC_LANE=$lanes/$name MEMORY_SHARE=${MEMORY_SHARE:-0.25}
    whole=()
    case $(words "$1") in # what times by other means than those of selfspec_cli is alone from its beginning to its end
        */kernels/* | *"selfspec profile"*) whole=(python3 "$here/alone/lanes.py" alone) ;;
    esac
    exec "${whole[@]}" bash "$jobs_file" "$models" "$out" "$1" 8>&-
)

missing() { # the first thing that a job needs and that could not be made
    local need
    for need in $(needs "$1"); do
        made "$need" || { echo "$need" && return; }
    done
}

refuse_others() { # ends where one of these is no job
    local job
    for job in "$@"; do
        is_job "$job" || { echo "$job: no such job; they are the functions of $jobs_file" >&2 && exit 2; }
    done
}

if [ "${1:-}" = --needs ]; then refuse_others "$2" && needs "$2" && exit 0; fi
name=$1
shift
if [ -z "${LANE_CHILD:-}" ]; then
    refuse_others "$@"
    exec 8>"$state/lane-$name.lock"
    flock -n 8 || true # taken here if it is free, so that poll.sh sees this lane from now on
    LANE_CHILD=1 setsid bash "$tree/experiments/offline_host/lane.sh" "$name" "$@" \
        </dev/null >>"$out/lane-$name.log" 2>&1 &
    exit 0
fi
flock 8
for job in "$@"; do
    absent=$(missing "$job")
    if [ -n "$absent" ]; then say "$job: not run, because $absent could not be made" && continue; fi
    say "$job begins"
    run_job "$job"
    release
done
say "lane $name is done"
