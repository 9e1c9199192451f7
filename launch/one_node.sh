#!/usr/bin/env bash
# Trains on all GPUs of this machine:   launch/one_node.sh CONFIG [key=value ...]
# NPROC=2 takes two processes, on GPUs or, with pipeline.device=cpu, without. PYTHON is the interpreter (python).
set -euo pipefail
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="${NPROC:-gpu}" -m flowrl train "$@"
