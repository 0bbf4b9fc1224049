#!/usr/bin/env bash
# Qwen2.5-3B-Instruct with LoRA on GSM8K, one node of 8 GPUs: FSDP2 + vLLM.
#
#   recipes/qwen2_5_3b_lora_gsm8k/run_qwen2_5_3b_lora_fsdp2.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen2_5_3b_lora_gsm8k/run_qwen2_5_3b_lora_fsdp2.sh $method
#   done

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
TRAIN=${TRAIN:-$HOME/data/gsm8k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/gsm8k/test.parquet}

# Knobs; recipes/launch.sh has the others.
NODES=${NODES:-1}

RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$RECIPE/../launch.sh"
