#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-1.5B on Open-RS, one node of 8 GPUs: FSDP2 + vLLM.
#
#   recipes/r1_distill_qwen_1_5b_open_rs/run_r1_distill_qwen_1_5b_fsdp2.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/r1_distill_qwen_1_5b_open_rs/run_r1_distill_qwen_1_5b_fsdp2.sh $method
#   done
set -euo pipefail

METHOD=${1:-covgrpo}
shift || true

# Three variables to set.
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
TRAIN=${TRAIN:-$HOME/data/open_rs/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs.
NODES=${NODES:-1}
GPUS=${GPUS:-8}
ROLLOUT=${ROLLOUT:-vllm}  # or sglang
OUTPUT=${OUTPUT:-$PWD/runs/r1_distill_qwen_1_5b_open_rs-$METHOD}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT/metrics.jsonl}

exec python3 -m verl.trainer.main_ppo \
  --config-path "$HERE" --config-name r1_distill_qwen_1_5b_open_rs \
  +method="$METHOD" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$TRAIN" \
  data.val_files="$VALIDATION" \
  actor_rollout_ref.rollout.name="$ROLLOUT" \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.default_local_dir="$OUTPUT/checkpoints" \
  trainer.experiment_name="r1_distill_qwen_1_5b_open_rs-$METHOD" \
  "$@"
