#!/bin/bash
# Both models on one GPU: prepare the text, then train the two recipes side by side on the same batches.
#   experiments/reference_model/train_both.sh WORK_FOLDER STEPS
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$1 steps=$2
python3 "$here/train.py" prepare --work "$work"
for recipe in early_exit plain; do
    python3 "$here/train.py" train --work "$work" --recipe "$recipe" --steps "$steps" >"$work/$recipe.log" 2>&1 &
done
wait
