#!/usr/bin/env bash
# Qwen3-30B-A3B on DAPO-Math-17k, four nodes of 8 GPUs: Megatron with expert parallelism + vLLM.
#
#   recipes/qwen3_30b_a3b_dapo17k/run_qwen3_30b_a3b_megatron.sh [METHOD] [overrides]
#
# A comparison is one loop:
#   for method in grpo clip_cov kl_cov dapo_clip_higher dr_grpo covgrpo; do
#     recipes/qwen3_30b_a3b_dapo17k/run_qwen3_30b_a3b_megatron.sh $method
#   done

# Three variables to set.
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
TRAIN=${TRAIN:-$HOME/data/dapo_math_17k/train.parquet}
VALIDATION=${VALIDATION:-$HOME/data/math/test.parquet}

# Knobs; recipes/launch.sh has the others.
NODES=${NODES:-4}

RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$RECIPE/../launch.sh"
