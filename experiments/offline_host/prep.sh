#!/bin/bash
# On the host, started by take.sh: makes packages, models and vLLM ready, each as soon as what it is made of is there.
# Progress stands in $out/prep.log, what each step says in $out/prep-NAME.log. Another take.sh tries failed steps again.
set -u
. "$(dirname "$0")/common.sh"
cd "$ROOT" || exit 1
exec 9>"$state/prep.lock"
flock -n 9 || exit 0 # one at a time
rm -f "$state"/failed.*

whole() ( # whether the files of these lines of the manifest are there and right; the sums only when all are there
    lines=$(cat)
    cd "$stage" && cut -c67- <<<"$lines" | while read -r file; do [ -e "$file" ] || exit 1; done &&
        sha256sum -c --status <<<"$lines"
)

came() { # came FOLDER/: waits until all files of the manifest in it are there, and whole
    local tries=0 wanted
    wanted=$(grep -F "  $1" "$stage/manifest.sha256") || return 1
    until whole <<<"$wanted"; do
        if [ "$tries" -ge "$WAIT" ]; then return 1; fi
        tries=$((tries + 1))
        sleep 1
    done
}

step() { # step NAME "WHAT IT NEEDS" COMMAND ...: needs are folders/ of the manifest, and steps
    local name=$1 need begun status
    if [ -e "$state/ready.$name" ]; then return; fi
    for need in $2; do
        case $need in */) came "$need" ;; *) made "$need" ;; esac && continue
        say "$name: not made, because $need is missing"
        touch "$state/failed.$name"
        return
    done
    shift 2
    begun=$(date +%s)
    "$@" >"$out/prep-$name.log" 2>&1
    status=$?
    if [ $status = 0 ]; then touch "$state/ready.$name"; else touch "$state/failed.$name"; fi
    say "$name: exit code $status, $(($(date +%s) - begun)) s"
    if [ $status != 0 ]; then tail -n 3 "$out/prep-$name.log"; fi
}

# For every engine three processes import vLLM and PyTorch, one after the other. Where they find no compiled modules,
# each of them needs 10 s of a processor more, and so do all later ones where Python does not keep what it compiles.
compile_modules() { python3 -m compileall -q -j 0 "$@" >/dev/null || true; } # not all that is installed can be
its_folder() { python3 -c "import importlib.util as u; print(u.find_spec('$1').submodule_search_locations[0])"; }

packages() {
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        "$stage"/wheels/*.whl &&
        cp -r "$stage"/wheels/*.dist-info "$site/" && # selfspec itself: its entry points, without its code
        compile_modules "$site" "$(its_folder torch)" "$(its_folder transformers)"
}
unpack_vllm() {
    mkdir -p "$vllm.part" && find "$stage/vllm" -name 'part-*' | sort -V | xargs cat | tar xJ -C "$vllm.part" &&
        mv "$vllm.part" "$vllm" && compile_modules "$vllm"
}
unpack_frontend() { # where vLLM's own package has it
    xz -dc "$stage/frontend/vllm-rs.xz" >"$vllm/vllm/vllm-rs" && chmod +x "$vllm/vllm/vllm-rs"
}
find_frontend() {
    use_packages
    python3 -c 'import importlib.util as u, os, sys
sys.exit(not os.access(u.find_spec("vllm").submodule_search_locations[0] + "/vllm-rs", os.X_OK))'
}
find_vllm() { python3 -c 'import importlib.util as u, sys; sys.exit(None if u.find_spec("vllm") else "no vLLM here")'; }
unpack_weights() {
    local file name
    for file in "$stage"/weights/*/*.xz; do
        name=${file#"$stage/weights/"}
        xz -dc "$file" >"$tree/experiments/reference_model/${name%.xz}" || return
    done
}
job() { # job NAME FILE: a job of gpu_host.sh that makes FILE; the script itself gives no exit code of its jobs
    local said
    # Without vLLM on the path: torch, safetensors and transformers are enough.
    said=$(env -u PYTHONPATH bash "$tree/experiments/gpu_host.sh" "$models" "$out" "$1")
    echo "$said"
    tail -n 3 "$out/$1.log"
    case $said in *"exit code 0,"*) [ -e "$models/$2" ] ;; *) return 1 ;; esac
}
check() { # what the lanes rest on, before an engine's minutes are spent on it
    use_packages
    cd "$tree" && python3 -c '
import importlib.metadata as metadata
assert any("selfspec" in point.value for point in metadata.entry_points(group="vllm.general_plugins"))
import torch, vllm
import sys
print("Python keeps compiled modules:", not sys.dont_write_bytecode)
print("torch", torch.__version__, "sees a GPU:", torch.cuda.is_available(), "vLLM", vllm.__version__)
' && python3 -c 'import locust' && python3 -m selfspec_cli sweep experiment=m0_sanity --dry-run
}

say "prep begins"
if grep -q '  vllm/' "$stage/manifest.sha256"; then
    step vllm vllm/ unpack_vllm &
else
    step vllm "" find_vllm &
fi
step site wheels/ packages &
if grep -q '  frontend/' "$stage/manifest.sha256"; then
    step frontend "vllm frontend/" unpack_frontend &
else
    step frontend "site vllm" find_frontend &
fi
step weights weights/ unpack_weights &
step pieces smollm2/ ln -sfn "$stage/smollm2" "$models/pieces" &
step check "site vllm weights" check &
step reference_widened weights job widened reference_widened/model.safetensors.index.json &
step plain_widened weights job plain_widened plain_widened/model.safetensors.index.json &
step smollm2 pieces job smollm2 smollm2_widened/config.json &
step smollm2_draft smollm2 job smollm2_draft smollm2_widened_drafts/int4/config.json &
wait
say "prep ends"
