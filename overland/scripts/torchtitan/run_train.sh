#!/usr/bin/env bash
# Trains with settings from the environment:
#
#   CONFIG_FILE   the config (or a recipe's name)           default: quickstart
#   NGPU          processes on this machine, one per GPU     default: one per device, 2 on a CPU
#   LOG_RANK      ranks that print, such as 0,1              default: 0
#   COMM_BACKEND  nccl, gloo, mpi or nvshmem                 default: depends on the device
#   DRY_RUN=1     check the config without training or using a GPU
#
#   CONFIG_FILE=./llama3_8b.toml NGPU=4 ./run_train.sh training.steps=20
set -euo pipefail

export CONFIG_FILE=${CONFIG_FILE:-quickstart}
export LOG_RANK=${LOG_RANK:-0}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
overland=$here/.venv/bin/overland
# `type -P` finds only files: a folder called overland is not a command.
[ -x "$overland" ] || overland=$(type -P overland) || {
    echo "overland: not found in $here/.venv or on the PATH; install it, or activate its environment." >&2
    exit 2
}
exec "$overland" train "$@"
