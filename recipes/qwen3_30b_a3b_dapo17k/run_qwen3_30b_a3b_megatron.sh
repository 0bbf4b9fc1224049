#!/usr/bin/env bash
# Qwen3-30B-A3B on DAPO-Math-17k, four nodes of 8 GPUs: Megatron with expert parallelism + vLLM.
#
#   recipes/qwen3_30b_a3b_dapo17k/run_qwen3_30b_a3b_megatron.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen3_30b_a3b_dapo17k/run_qwen3_30b_a3b_megatron.sh $method
#   done
set -euo pipefail

METHOD=${1:-covgrpo}
shift || true

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
TRAIN=${TRAIN:-$HOME/data/dapo_math_17k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs.
NODES=${NODES:-4}
GPUS=${GPUS:-8}
ROLLOUT=${ROLLOUT:-vllm}  # or sglang
OUTPUT=${OUTPUT:-$PWD/runs/qwen3_30b_a3b_dapo17k-$METHOD}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT/metrics.jsonl}

exec python3 -m verl.trainer.main_ppo \
  --config-path "$HERE" --config-name qwen3_30b_a3b_dapo17k \
  +method="$METHOD" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$TRAIN" \
  data.val_files="$VALIDATION" \
  actor_rollout_ref.rollout.name="$ROLLOUT" \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.default_local_dir="$OUTPUT/checkpoints" \
  trainer.experiment_name="qwen3_30b_a3b_dapo17k-$METHOD" \
  "$@"
