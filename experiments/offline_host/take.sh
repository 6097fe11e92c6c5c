#!/bin/bash
# On the host, in every upload, from the checkout that came:   bash experiments/offline_host/take.sh
# Stages what came in .pack/, copies the checkout (the first time, or with RETREE=1), and leaves prep.sh running.
set -eu
. "$(dirname "$0")/common.sh"
checkout=$(cd "$here/../.." && pwd)

stage_files() {
    local folder file
    for folder in "$checkout"/.pack/*/; do
        if [ ! -d "$folder" ]; then continue; fi
        find "$folder" -type f -printf '%P\0' | while IFS= read -r -d '' file; do
            mkdir -p "$stage/$(dirname "$file")"
            cp "$folder/$file" "$stage/$file.taking"
            mv -f "$stage/$file.taking" "$stage/$file" # prep.sh sees a whole file or none
        done
    done
}

copy_tree() { # the next upload may replace this checkout; nothing that runs needs what is hidden in it
    mkdir -p "$tree"
    # A script that runs is not disturbed: tar removes the old file and writes another one.
    tar c -C "$checkout" --exclude='./.*' --exclude=__pycache__ . | tar x -C "$tree"
    touch "$state/ready.tree"
}

stage_files
if [ ! -e "$state/ready.tree" ] || [ -n "${RETREE:-}" ]; then copy_tree; fi
say "staged: $(find "$stage" -type f | wc -l) files; checkout: $(find "$tree" -type f | wc -l) files"
# As a lane of its own, so that it stands still too while a lane is timed.
SELFSPEC_LANE=$lanes/prep setsid bash "$tree/experiments/offline_host/prep.sh" </dev/null >>"$out/prep.log" 2>&1 &
