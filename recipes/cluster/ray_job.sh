#!/usr/bin/env bash
# A recipe as a job of a running Ray cluster.
#
#   On the head node:       ray start --head --dashboard-host=0.0.0.0
#   On every other node:    ray start --address=HEAD:6379
#   From anywhere:          RAY_API=http://HEAD:8265 recipes/cluster/ray_job.sh SCRIPT [METHOD] [overrides]
#
# Every node needs the same environment, this package included: verl-covgrpo doctor --cluster asks each.
set -euo pipefail

SCRIPT=${1:?"usage: recipes/cluster/ray_job.sh recipes/NAME/run_....sh [METHOD] [overrides]"}
shift
RAY_API=${RAY_API:-http://127.0.0.1:8265}
# Where this clone lies on the nodes of the cluster.
FOLDER=${FOLDER:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
ENVIRONMENT=${ENVIRONMENT:-"{\"env_vars\": {\"TOKENIZERS_PARALLELISM\": \"true\", \"NCCL_DEBUG\": \"WARN\"}}"}

exec ray job submit --address "$RAY_API" --runtime-env-json "$ENVIRONMENT" -- \
  bash -c "cd '$FOLDER' && exec '$SCRIPT' \"\$@\"" run "$@"
