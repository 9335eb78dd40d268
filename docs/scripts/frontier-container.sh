#!/bin/bash -l
# Written by `overland submit` for frontier: 64 nodes × 8 devices = 512 ranks.
#SBATCH --job-name=llama-522ec3
#SBATCH --account=abc123
#SBATCH --constraint=nvme
#SBATCH --nodes=66
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=02:00:00
#SBATCH --output=/lustre/orion/abc123/scratch/me/runs/llama/logs/job-%j.log
#SBATCH --network=disable_rdzv_get
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
finished() { [ "$(head -n 1 /lustre/orion/abc123/scratch/me/runs/llama/done 2>/dev/null)" -ge 100 ] 2>/dev/null; }
if finished; then
    log 'already finished: /lustre/orion/abc123/scratch/me/runs/llama'
    exit 0
fi
# A run that failed for good is not tried again until it is resubmitted.
if [ -e /lustre/orion/abc123/scratch/me/runs/llama/stopped ]; then
    log "not started, because this run was stopped: $(cat /lustre/orion/abc123/scratch/me/runs/llama/stopped)"
    exit 1
fi
log "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST"

# Variables set below must reach the ranks; those left behind by an earlier launcher must not.
export SLURM_EXPORT_ENV=ALL
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NGPU

module reset
module load cpe/26.03 craype-accel-amd-gfx90a rocm/7.1.1 rccl-net-plugin || exit 1

# Training never opens a connection: a library that tries to fails at once instead of waiting.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export WANDB_MODE="${WANDB_MODE:-offline}"
unset http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY

# Without both of these, nothing beyond about 300 nodes works
# (frontier-torchtitan).
export NCCL_SOCKET_IFNAME="hsn0"
export GLOO_SOCKET_IFNAME="hsn0"
# RCCL over Slingshot (OLCF guide; the training stub writes PHB as 3). NCCL_ALGO=TREE, which
# frontier-torchtitan sets, is omitted: all-gather and reduce-scatter, which make up most of the
# traffic of sharded training, have no tree algorithm.
export NCCL_CROSS_NIC="1"
export NCCL_NET_GDR_LEVEL="PHB"
export HSA_FORCE_FINE_GRAIN_PCIE="1"
# The default monitor (memhooks) can deadlock.
export FI_MR_CACHE_MONITOR="kdreg2"
# RCCL can deadlock while registering host memory.
export FI_CXI_DISABLE_HOST_REGISTER="1"
# Queues long enough for collectives over thousands of ranks.
export FI_CXI_DEFAULT_CQ_SIZE="131072"
export FI_CXI_DEFAULT_TX_SIZE="2048"
# Requires --network=disable_rdzv_get.
export FI_CXI_RDZV_PROTO="alt_read"
# Message matching falls back to software when the hardware's lists are full.
export FI_CXI_RX_MATCH_MODE="hybrid"
# MIOpen's cache is a database: on Lustre it fails with disk I/O errors, and two jobs must not share
# it (training stub).
export MIOPEN_USER_DB_PATH="/tmp/$USER-$SLURM_JOB_ID-miopen"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
# Compiled kernels would otherwise go to home, which is read-only on compute nodes. The run folder
# keeps them for the next job, which copies them back here.
export TRITON_CACHE_DIR="/tmp/$USER-$SLURM_JOB_ID-triton"
export TORCHINDUCTOR_CACHE_DIR="/tmp/$USER-$SLURM_JOB_ID-inductor"
# Eight ranks share the node's cores; the work is on the devices
# (training stub, frontier-torchtitan).
export OMP_NUM_THREADS="1"

cd /lustre/orion/abc123/scratch/me || exit 1

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
rank='mkdir -p "$MIOPEN_USER_DB_PATH"; trap "" USR1 USR2; trap : TERM; "$@"; code=$?; [ "$code" -ne 0 ] || echo "overland ended: $SLURMD_NODENAME"; exit $((code == 75 ? 0 : code))'

# How ranks are launched; the supervisor adds the nodes. --kill-on-bad-exit: a rank that fails would
# leave the others waiting for it. --wait=0: the first rank may still be writing weights long after
# the others have exited.
launch=(
    srun --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest
    --mpi=none --no-kill --kill-on-bad-exit=1 --wait=0 --label
    bash -c "$rank" rank
    apptainer exec --rocm --bind /lustre/orion --bind /mnt/bb --bind /opt/cray /lustre/orion/abc123/scratch/me/overland.sif python -P -m overland
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
done >>/lustre/orion/abc123/scratch/me/runs/llama/logs/"guards-$SLURM_JOB_ID.log" 2>&1

# Tests the nodes, starts the ranks on 64 good ones of 66, monitors them, and restarts them if a
# rank or a node is lost (see docs/clusters.md). `exec`, so that signals reach the supervisor.
exec /lustre/orion/abc123/scratch/me/envs/overland/bin/python -P -m overland supervise /lustre/orion/abc123/scratch/me/runs/llama/submit/1.toml \
    --nodes 64 --tasks-per-node 8 --steps 100 --requeue -- "${launch[@]}"
