#!/usr/bin/env bash
# Qwen3-8B on DAPO-Math-17k, one node of 8 GPUs: FSDP2 + vLLM.
#
#   recipes/qwen3_8b_dapo17k/run_qwen3_8b_fsdp2.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen3_8b_dapo17k/run_qwen3_8b_fsdp2.sh $method
#   done

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen3-8B}
TRAIN=${TRAIN:-$HOME/data/dapo_math_17k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs; recipes/launch.sh has the others.
NODES=${NODES:-1}

RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$RECIPE/../launch.sh"
