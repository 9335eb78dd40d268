#!/bin/bash -l
# Written by `overland submit` for generic-nvidia: 4 nodes × 4 devices = 16 ranks.
#SBATCH --job-name=llama-4d7673
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
#SBATCH --output=/scratch/me/runs/llama/logs/job-%j.log
#SBATCH --exclusive
#SBATCH --mem=0
# Jobs of one name run one at a time: the links of a chain, and never two jobs in one run folder.
#SBATCH --dependency=singleton
# Slurm would end the job with its first lost node.
#SBATCH --no-kill
# After preemption or the loss of its first node the job goes back into the queue; its log goes on.
#SBATCH --requeue
#SBATCH --open-mode=append
# Before the end, ranks save and stop. Without `B:`, which would signal this shell alone.
#SBATCH --signal=USR1@180
# Nothing of the shell that submitted comes along: no token, no proxy, no stale rank.
#SBATCH --export=NONE

log() { printf '%(%F %T)T %s\n' -1 "$*"; }

# The training loop writes the steps it has done when it is through. A link that is not needed any
# more ends here.
finished() { [ "$(cat /scratch/me/runs/llama/done 2>/dev/null)" -ge 100 ] 2>/dev/null; }
if finished; then
    log 'finished already: /scratch/me/runs/llama'
    exit 0
fi
# What would fail again is not tried again, until the run is submitted anew.
if [ -e /scratch/me/runs/llama/stopped ]; then
    log "not started, since this run was stopped: $(cat /scratch/me/runs/llama/stopped)"
    exit 1
fi
log "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"

# What is set below must reach the ranks; what an earlier launcher left behind must not.
export SLURM_EXPORT_ENV=ALL
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NGPU

# Training never opens a connection: a library that tries fails at once, where it would wait.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export WANDB_MODE="${WANDB_MODE:-offline}"

# A collective that hangs leaves a record of what each rank waited for.
export TORCH_FR_BUFFER_SIZE="2000"
export TORCH_NCCL_DUMP_ON_TIMEOUT="1"

cd /scratch/me || exit 1

# The node's cores, shared out. Without it, srun would give every rank one.
cpus=$((SLURM_CPUS_ON_NODE / 4))
[ "$cpus" -ge 1 ] || cpus=1

# Ranks also watch the clock themselves. Older Slurms do not tell them when the job ends.
if [ -z "$SLURM_JOB_END_TIME" ]; then
    SLURM_JOB_END_TIME=$(date -d "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)" +%s)
fi
export SLURM_JOB_END_TIME

# Around each rank. 75 says "stopped and saved, to be resumed": no failure, and srun must not kill
# for it those who are still on their way out. Slurm signals every process of a rank, this shell
# too, which waits for the rank. Of a rank that ends with 0 srun tells nothing.
# shellcheck disable=SC2016
rank='trap : USR1 USR2 TERM; "$@"; code=$?; [ "$code" -ne 0 ] || echo "overland ended: $SLURMD_NODENAME"; exit $((code == 75 ? 0 : code))'

# How ranks are started, on nodes that the supervisor adds. --kill-on-bad-exit: a rank that failed
# leaves the others waiting for it. --wait=0: the first rank may write weights long after the others
# have ended.
launch=(
    srun --ntasks-per-node=4 --cpus-per-task="$cpus" --gpus-per-node=4
    --mpi=none --no-kill --kill-on-bad-exit=1 --wait=0 --label
    bash -c "$rank" rank
    /scratch/me/envs/overland/bin/python -m overland
)

# Slurm keeps a job that has lost its first node, an empty shell, until its time is over: --no-kill.
# So other nodes look for that every half minute, and give such a job back, unless it runs again.
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
    # Far apart; beside the ranks, and with nothing that they need.
    node=$((guard_number * (SLURM_JOB_NUM_NODES - 1) / 3))
    env -u SLURM_GPUS_PER_NODE srun --job-name=guard --relative="$node" --nodes=1 --ntasks=1 \
        --ntasks-per-node=1 --cpus-per-task=1 --mem=0 --gres=none --overlap --no-kill --mpi=none \
        bash -c "$guard" guard "$SLURMD_NODENAME" "${SLURM_RESTART_COUNT:-0}" &
done >>/scratch/me/runs/llama/logs/"guards-$SLURM_JOB_ID.log" 2>&1

# Tests the nodes, starts the ranks on 4 good ones, watches them, and starts them again where a
# rank or a node is lost; docs/clusters.md tells how. `exec`: signals reach it.
exec /scratch/me/envs/overland/bin/python -m overland supervise /scratch/me/runs/llama/submit/1.toml \
    --nodes 4 --tasks-per-node 4 --steps 100 --requeue -- "${launch[@]}"
