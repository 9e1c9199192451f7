#!/usr/bin/env bash
# Trains on all GPUs of this machine:   launch/one_node.sh CONFIG [key=value ...]
# NPROC=2 takes two processes, of GPUs or, where there are none, on the CPU. PYTHON is the interpreter (default: python).
set -euo pipefail
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-gpu}" -m flowrl train "$@"
