#!/usr/bin/env bash
# Trains on several machines; on each of them, with the same arguments and its own NODE (0, 1, ...):
#   MASTER=10.0.0.1 NODE=0 launch/two_nodes.sh CONFIG out=/shared/runs/NAME [key=value ...]
# MASTER is the address of node 0. NODES (2), NPROC (all GPUs), PORT (29400) and PYTHON (python) may be set.
set -euo pipefail
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes="${NODES:-2}" --node-rank="${NODE:?which machine: 0, 1, ...}" \
  --nproc-per-node="${NPROC:-gpu}" --master-addr="${MASTER:?address of node 0}" --master-port="${PORT:-29400}" \
  -m flowrl train "$@"
