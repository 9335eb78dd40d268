#!/bin/bash
# Llama 3.1 8B at 8192 tokens on 64 nodes of Frontier, 24 hours:
#
#   export SBATCH_ACCOUNT=abc123
#   sbatch train_8B_n64.sh                 one session; the same line again resumes
#   ./train_8B_n64.sh --sessions 10        a chain of ten, with `overland submit`
#
# Set CONFIG_FILE for another config; settings may follow, such as optimizer.lr=3e-4. Python and the
# tokenized text are on each node's own disk: Python as setup.sh packed it (--packed-env none imports
# from where it is), the text by data.cache_folder.
#SBATCH --job-name=train_llama_8B_n64
#SBATCH --output=train_llama_8B_n64_%j.out
#SBATCH --partition=extended
#SBATCH --nodes=64
#SBATCH --time=24:00:00
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --constraint=nvme
#SBATCH --network=disable_rdzv_get
#SBATCH --dependency=singleton
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

exec overland submit "${CONFIG_FILE:-./train_configs/llama3_8b_n64.toml}" --site frontier --partition extended \
    --nodes "${SLURM_JOB_NUM_NODES:-64}" ${SLURM_JOB_ID:+--here} \
    "data.cache_folder=/mnt/bb/$USER/overland" "$@"
