#!/usr/bin/env bash
# The first night on a GPU, NVIDIA's or AMD's: tests, tunes and measures. From the project's root:
#   bash slurm/first_night.sh                         all stages below, in up to three hours
#   STAGES="kernels loss" bash slurm/first_night.sh   some of them
#   sbatch --gpus=8 slurm/first_night.sh              the same as a job of one node
# OUT=first-night: a folder for versions.txt, NAME.log, NAME.done and tables. LIMIT=540: seconds of
# a stage, since some machines are lent for ten minutes. Started again, it skips what is done, and
# training goes on after its last row. At the end it names the stages that failed (status 1), as
# training does whose model does not fit. Without a GPU: two stages, in small, on the CPU.
#SBATCH --job-name=first-night --ntasks=1 --gpus=1 --cpus-per-task=8 --time=04:00:00
set -um # -m: Ctrl-C comes here, and not to the stage
fail() { echo "error: $*" >&2 && exit 2; }
[[ -f fsdp_train.py ]] || fail "start it in the root of the project: bash slurm/first_night.sh"
export OUT=${OUT:-first-night} SMALL='' PYTHONUNBUFFERED=1 PATH=$PWD/.venv/bin:$PATH
mkdir -p "$OUT" && exec 9>> "$OUT/lock" && flock -n 9 || fail "OUT=$OUT is in use, or no folder"
names='[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]'
gpus=$(python -c "import torch; print(*$names, sep='\n')") || fail "no torch starts: see INSTALL.md"
[[ ! -f $OUT/gpus || $(< "$OUT/gpus") == "$gpus" ]] || fail "$OUT is of other GPUs: set another OUT"
echo "$gpus" > "$OUT/gpus"
(date; git log -1 --format=%H; python -m torch.utils.collect_env) &> "$OUT/versions.txt"
echo "${gpus:-no GPU (if there is one: INSTALL.md)}"
[[ $gpus ]] || STAGES=${STAGES:-loss resume}
[[ $gpus ]] || SMALL="--d_model=64 --n_heads=2 --n_layers=1 --vocab_size=257 --tokenizer=bytes"
resume() { # the demo undisturbed, and killed with -9 and resumed: figures equal bit by bit?
    set -e
    run() { exec python fsdp_train.py configs/demo.py $SMALL --max_steps=160 --save_interval=40 \
        --data_dir="$OUT/tokens" --run_dir="$OUT/$1"; }
    figures() { sed -n 's/, "skipped".*//p' "$OUT/$1/metrics.jsonl"; } # loss, norm, batch's hash
    rm -rf "$OUT/whole" "$OUT/killed"
    (run whole)
    run killed &
    until grep -qs '"step": 60,' "$OUT/killed/metrics.jsonl"; do
        kill -0 $! 2> /dev/null || wait $! # a run that has ended: with its status
        sleep 0.02
    done
    kill -9 $!
    wait $! || (run killed)
    grep -o '"first_step": [1-9][0-9]*' "$OUT/killed/launches.jsonl" # where it resumed
    cmp <(figures whole) <(figures killed)
    echo "bit-equal: $(figures killed | grep -c batch_hash) steps"
    rm -r "$OUT/whole" "$OUT/killed" "$OUT/tokens"
}
export -f resume
to=--out=$(printf %q "$OUT") # as one types it
train="python -m bench train $to/train.csv --grad_accum=2 --rounds=3 --steps=2 --compile=true"
stages="kernels python -m fast.flash_attention
loss python -m fast.cross_entropy
resume resume
tests python -m pytest -m gpu -q -rfEs -n 4
1b-alibi $train --sizes=1b --alibi --sweep=microbatch_size=8,16
attention python -m bench attention $to --lengths=2048,8192 --head_dims=64,128 --rounds=3
tune-64 python -m fast.flash_attention --tune=64
tune-128 python -m fast.flash_attention --tune=128
125m-350m $train --sizes=125m,350m --sweep=microbatch_size=8,32
1b $train --sizes=1b --sweep=microbatch_size=2,8
3b $train --sizes=3b --sweep=microbatch_size=2,8 --activation_checkpointing=none
7b $train --sizes=7b --sweep=microbatch_size=1,4
generate python -m bench serve $to/generate.csv --shapes=2048x24 --engine=32"
[[ $gpus != *$'\n'* ]] || stages+=$'\nlost-rank python -m lessons.lost_rank kill'
for name in ${STAGES:-}; do
    grep -q "^$name " <<< "$stages" || fail "no stage $name: $(cut -d' ' -f1 <<< "$stages" | xargs)"
done
trap 'kill $!; wait; exit 130' INT TERM HUP
failed=()
while read -r name command <&3; do
    [[ " ${STAGES:-$name} " == *" $name "* ]] || continue
    [[ -f $OUT/$name.done ]] && echo "$name: done before" && continue
    echo "$name: $command"
    timeout -k 40 "${LIMIT:-540}" bash -c "trap 'wait; exit 1' TERM; $command" \
        &>> "$OUT/$name.log" < /dev/null 9>&- &
    wait $! && touch "$OUT/$name.done" || failed+=("$name, status $?: $(tail -n1 "$OUT/$name.log")")
done 3<<< "$stages"
((${#failed[@]} == 0)) || { printf 'failed: %s\n' "${failed[@]}" && exit 1; }
