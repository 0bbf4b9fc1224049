#!/usr/bin/env bash
# Qwen2.5-32B on DAPO-Math-17k, four nodes of 8 GPUs: Megatron (TP 8, PP 2) + vLLM.
#
#   recipes/qwen2_5_32b_dapo17k/run_qwen2_5_32b_megatron.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen2_5_32b_dapo17k/run_qwen2_5_32b_megatron.sh $method
#   done

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
TRAIN=${TRAIN:-$HOME/data/dapo_math_17k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs; recipes/launch.sh has the others.
NODES=${NODES:-4}

RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$RECIPE/../launch.sh"
