#!/bin/bash
# The control alone, with the tokens of the embedded model: plain training on the text of this machine.
#   experiments/reference_model/train_plain.sh WORK_FOLDER STEPS
# Leaves the model (30.7 MB in bf16) in WORK_FOLDER/plain/model; measure it with model=WORK_FOLDER/plain/model.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
work=$1 steps=$2
python3 "$here/train.py" prepare --work "$work" --tokenizer "$here/model/tokenizer.json"
python3 "$here/train.py" train --work "$work" --recipe plain --steps "$steps"
