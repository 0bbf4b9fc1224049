#!/usr/bin/env bash
# Qwen2.5-3B-Instruct with LoRA on GSM8K, one node of 8 GPUs: FSDP2 + vLLM.
#
#   recipes/qwen2_5_3b_lora_gsm8k/run_qwen2_5_3b_lora_fsdp2.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen2_5_3b_lora_gsm8k/run_qwen2_5_3b_lora_fsdp2.sh $method
#   done
set -euo pipefail

METHOD=${1:-covgrpo}
shift || true

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/gsm8k/test.parquet}

# Knobs.
NODES=${NODES:-1}
GPUS=${GPUS:-8}
ROLLOUT=${ROLLOUT:-vllm}  # or sglang
OUTPUT=${OUTPUT:-$PWD/runs/qwen2_5_3b_lora_gsm8k-$METHOD}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT/metrics.jsonl}

exec python3 -m verl.trainer.main_ppo \
  --config-path "$HERE" --config-name qwen2_5_3b_lora_gsm8k \
  +method="$METHOD" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$TRAIN" \
  data.val_files="$VALIDATION" \
  actor_rollout_ref.rollout.name="$ROLLOUT" \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.default_local_dir="$OUTPUT/checkpoints" \
  trainer.experiment_name="qwen2_5_3b_lora_gsm8k-$METHOD" \
  "$@"
