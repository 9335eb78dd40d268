#!/bin/bash -l
# Written by `overland submit` for laptop: 1 node × 2 devices = 2 ranks.

log() { printf '%(%F %T)T %s\n' -1 "$*"; }

# The training loop writes the number of completed steps when it finishes. Jobs of the chain that
# are no longer needed end here.
finished() { [ "$(head -n 1 /home/me/runs/llama/done 2>/dev/null)" -ge 100 ] 2>/dev/null; }
if finished; then
    log 'already finished: /home/me/runs/llama'
    exit 0
fi
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NGPU

# Training never opens a connection: a library that tries to fails at once instead of waiting.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export WANDB_MODE="${WANDB_MODE:-offline}"

cd /home/me || exit 1
export NGPU=2

for ((session = 1; session <= 1; session++)); do
    log "session $session of 1"
    /home/me/envs/overland/bin/python -P -m overland train /home/me/runs/llama/submit/1.toml
    code=$?
    finished && exit 0
    # Exit code 75 means "stopped and saved, to be resumed".
    [ "$code" -eq 75 ] || exit "$code"
done
log "stopped and saved; submit again to resume"
