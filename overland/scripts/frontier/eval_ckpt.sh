#!/bin/bash
# Evaluates a checkpoint, of any format, on one node of Frontier:
#
#   overland fetch tasks @frontier                  once, on a machine with a network
#   export SBATCH_ACCOUNT=abc123
#   sbatch eval_ckpt.sh runs/llama3_8b_frontier     or a checkpoint, or what dcp_to_llama.py wrote
#   ./eval_ckpt.sh outputs/pt --tokenizer torchtitan/datasets/tokenizer
#
# Set TASKS=hellaswag,mmlu for other tasks than the nine of the list, or CONFIG_FILE to a file whose
# `tasks:` are meant, such as eval_configs/config_mmlu.yaml; flags of `overland eval` may follow.
#SBATCH --job-name=eval_ckpt
#SBATCH --output=eval_ckpt_%j.out
#SBATCH --nodes=1
#SBATCH --time=02:00:00
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --constraint=nvme
#SBATCH --network=disable_rdzv_get
#SBATCH --requeue
#SBATCH --open-mode=append

checkpoint=${1:?name a checkpoint or a run: eval_ckpt.sh CHECKPOINT}
if [ -n "$CONFIG_FILE" ]; then
    TASKS=$(sed -n 's/^tasks: *\[\(.*\)\].*/\1/p' "$CONFIG_FILE" | tr -d "\"' ")
    : "${TASKS:?$CONFIG_FILE has no line such as tasks: [\"mmlu\"]}"
    echo "note: of $CONFIG_FILE, only tasks: is read: $TASKS" >&2
fi
exec overland submit "$checkpoint" --eval --tasks "${TASKS:-@frontier}" --site frontier \
    ${SLURM_JOB_ID:+--here} "${@:2}"
