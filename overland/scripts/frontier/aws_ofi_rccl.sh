#!/bin/sh
# Builds aws-ofi-rccl, the plugin that lets RCCL use libfabric; without it, RCCL falls back to TCP.
# Frontier provides it as the module rccl-net-plugin, which every job of `overland submit` loads;
# use this script for a version of ROCm or libfabric that the module does not support.
#
#   sh aws_ofi_rccl.sh
#   ROCM_PATH=/opt/rocm-7.1.1 LIBFABRIC=/opt/cray/libfabric/2.1 PREFIX=$HOME/plugin sh aws_ofi_rccl.sh
set -eu
ROCM_PATH=${ROCM_PATH:-/opt/rocm-6.3.1}
LIBFABRIC=${LIBFABRIC:-/opt/cray/libfabric/1.22.0}
PREFIX=${PREFIX:-$PWD/aws-ofi-rccl}
for folder in "$ROCM_PATH" "$LIBFABRIC"; do
    [ -d "$folder" ] || {
        echo "$folder does not exist; set ROCM_PATH and LIBFABRIC to the versions on this machine" >&2
        exit 2
    }
done
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
git clone --depth 1 https://github.com/ROCm/aws-ofi-rccl "$build"
cd "$build"
./autogen.sh
CC=hipcc CXX=hipcc ./configure --with-libfabric="$LIBFABRIC" --with-hip="$ROCM_PATH" \
    --with-rccl="$ROCM_PATH" --prefix="$PREFIX"
make -j "${MAX_JOBS:-8}" install
echo "Built. In sites/frontier.toml: LD_LIBRARY_PATH = \"$PREFIX/lib:\$LD_LIBRARY_PATH\""
