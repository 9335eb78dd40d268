#!/bin/bash
# Tokens per second (wps) and MFU of Llama 3.1 8B on 8 nodes of Frontier, fully sharded:
#
#   export SBATCH_ACCOUNT=abc123
#   sbatch train_8B_n8_benchmark.sh
#   sbatch --nodes=16 train_8B_n8_benchmark.sh      on another number of nodes
#   ./train_8B_n8_benchmark.sh --nodes 16           the same, with `overland submit`
#
# The log has both per device, and `overland report RUN --json` the medians. Set CONFIG_FILE for
# another config; settings may follow. With these two, nothing needs to be fetched:
# training.dataset=random model.hf_assets_path=none
#SBATCH --job-name=train_llama_8B_n8_benchmark
#SBATCH --output=train_llama_8B_n8_benchmark_%j.out
#SBATCH --nodes=8
#SBATCH --time=01:00:00
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --constraint=nvme
#SBATCH --network=disable_rdzv_get
#SBATCH --dependency=singleton
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@180

exec overland submit "${CONFIG_FILE:-./train_configs/llama3_8b_n8_benchmark.toml}" --site frontier \
    --nodes "${SLURM_JOB_NUM_NODES:-8}" ${SLURM_JOB_ID:+--here} "$@"
