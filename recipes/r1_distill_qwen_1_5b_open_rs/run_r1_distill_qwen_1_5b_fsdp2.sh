#!/usr/bin/env bash
# DeepSeek-R1-Distill-Qwen-1.5B on Open-RS, one node of 8 GPUs: FSDP2 + vLLM.
#
#   recipes/r1_distill_qwen_1_5b_open_rs/run_r1_distill_qwen_1_5b_fsdp2.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/r1_distill_qwen_1_5b_open_rs/run_r1_distill_qwen_1_5b_fsdp2.sh $method
#   done

# Three variables to set.
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
TRAIN=${TRAIN:-$HOME/data/open_rs/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs; recipes/launch.sh has the others.
NODES=${NODES:-1}

RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$RECIPE/../launch.sh"
