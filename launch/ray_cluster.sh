#!/usr/bin/env bash
# A Ray cluster for workers, which ends with this command (Ctrl-C):
#   launch/ray_cluster.sh head             on one machine; others reach it at its address and PORT (6379)
#   launch/ray_cluster.sh join HEAD:6379   on each of the others
# and then, on any of them, flowrl train CONFIG workers.address=HEAD:6379 workers.rewards=4. RAY is the command (ray).
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
case "${1:-}" in
  head) exec "${RAY:-ray}" start --head --port="${PORT:-6379}" --include-dashboard=false --block "${@:2}" ;;
  join) exec "${RAY:-ray}" start --address="${2:?HEAD:PORT}" --block "${@:3}" ;;
  *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
