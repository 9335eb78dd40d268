#!/bin/bash -l
# Written by `overland submit` for generic-cpu: 4 nodes × 1 device = 4 ranks.
#SBATCH --job-name=llama-4d7673
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --output=/scratch/me/runs/llama/logs/job-%j.log
#SBATCH --exclusive
#SBATCH --mem=0
# Jobs with the same name run one at a time, so a chain never has two jobs in the run folder.
#SBATCH --dependency=singleton
# Otherwise Slurm would end the job as soon as it loses a node.
#SBATCH --no-kill
# After preemption or the loss of its first node the job is requeued, and its log is continued.
#SBATCH --requeue
#SBATCH --open-mode=append
# Ranks save and stop shortly before the time limit. No `B:`, which would signal only this shell.
#SBATCH --signal=USR1@180
# The job does not inherit the submitting shell's environment: no tokens, proxies or stale ranks.
#SBATCH --export=NONE

log() { printf '%(%F %T)T %s\n' -1 "$*"; }

# The training loop writes the number of completed steps when it finishes. Jobs of the chain that
# are no longer needed end here.
finished() { [ "$(head -n 1 /scratch/me/runs/llama/done 2>/dev/null)" -ge 100 ] 2>/dev/null; }
if finished; then
    log 'already finished: /scratch/me/runs/llama'
    exit 0
fi
# A run that failed for good is not tried again until it is resubmitted.
if [ -e /scratch/me/runs/llama/stopped ]; then
    log "not started, because this run was stopped: $(cat /scratch/me/runs/llama/stopped)"
    exit 1
fi
log "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"

# Variables set below must reach the ranks; those left behind by an earlier launcher must not.
export SLURM_EXPORT_ENV=ALL
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NGPU

# Training never opens a connection: a library that tries to fails at once instead of waiting.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export WANDB_MODE="${WANDB_MODE:-offline}"

cd /scratch/me || exit 1

# Divide the node's cores among its ranks. Without this, srun would give each rank one core.
cpus=$((SLURM_CPUS_ON_NODE / 1))
[ "$cpus" -ge 1 ] || cpus=1

# Ranks also watch the clock themselves. Older versions of Slurm do not set the job's end time.
if [ -z "$SLURM_JOB_END_TIME" ]; then
    SLURM_JOB_END_TIME=$(date -d "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)" +%s)
fi
export SLURM_JOB_END_TIME

# Wrapper around each rank. Exit code 75 means "stopped and saved, to be resumed": not a failure, so
# srun must not kill the ranks that are still exiting. Slurm signals every process of a rank,
# including this shell, which waits for the rank; a rank that is only starting inherits that USR1
# and USR2 are ignored, until it handles them. srun does not report ranks that exit with 0.
# shellcheck disable=SC2016
rank='trap "" USR1 USR2; trap : TERM; "$@"; code=$?; [ "$code" -ne 0 ] || echo "overland ended: $SLURMD_NODENAME"; exit $((code == 75 ? 0 : code))'

# How ranks are launched; the supervisor adds the nodes. --kill-on-bad-exit: a rank that fails would
# leave the others waiting for it. --wait=0: the first rank may still be writing weights long after
# the others have exited.
launch=(
    srun --ntasks-per-node=1 --cpus-per-task="$cpus"
    --mpi=none --no-kill --kill-on-bad-exit=1 --wait=0 --label
    bash -c "$rank" rank
    /scratch/me/envs/overland/bin/python -P -m overland
)

# With --no-kill, Slurm keeps a job that has lost its first node, as an empty shell, until its time
# limit. So other nodes check for that every 30 seconds, and requeue or cancel such a job unless it has restarted.
# shellcheck disable=SC2016
guard='trap : USR1 USR2
while :; do
    sleep 30
    job=$(scontrol show job "$SLURM_JOB_ID" --oneliner)
    nodes=${job#* NodeList=}
    nodes=$(scontrol show hostnames "${nodes%% *}" | tr "\n" " ")
    if [[ $job == *" JobState=RUNNING "* && $job == *" Restarts=$2 "* ]] &&
        [[ $nodes && " $nodes" != *" $1 "* ]]; then
        if [ "$2" -lt 10 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        else
            scancel "$SLURM_JOB_ID"
        fi
    fi
done'
for ((guard_number = 1; guard_number <= 3; guard_number++)); do
    # Spread over the nodes, next to the ranks, and without taking resources from them.
    node=$((guard_number * (SLURM_JOB_NUM_NODES - 1) / 3))
    env -u SLURM_GPUS_PER_NODE srun --job-name=guard --relative="$node" --nodes=1 --ntasks=1 \
        --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --gres=none --overlap --no-kill --mpi=none \
        bash -c "$guard" guard "$SLURMD_NODENAME" "${SLURM_RESTART_COUNT:-0}" &
done >>/scratch/me/runs/llama/logs/"guards-$SLURM_JOB_ID.log" 2>&1

# Tests the nodes, starts the ranks on 4 good ones, monitors them, and restarts them if a
# rank or a node is lost (see docs/clusters.md). `exec`, so that signals reach the supervisor.
exec /scratch/me/envs/overland/bin/python -P -m overland supervise /scratch/me/runs/llama/submit/1.toml \
    --nodes 4 --tasks-per-node 1 --steps 100 --requeue -- "${launch[@]}"
