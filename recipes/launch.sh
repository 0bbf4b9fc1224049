# What every run script does, once it has said what it runs. Sourced, with the script's own arguments:
#   [METHOD] [overrides]
# RECIPE is the recipe's folder; MODEL, TRAIN, VALIDATION and NODES have the script's defaults.
set -euo pipefail

METHOD=${1:-covgrpo}
shift || true
NAME=$(basename "$RECIPE")

# Knobs.
GPUS=${GPUS:-8}
ROLLOUT=${ROLLOUT:-vllm}  # or sglang
OUTPUT=${OUTPUT:-$PWD/runs/$NAME-$METHOD}

mkdir -p "$OUTPUT"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUTPUT/metrics.jsonl}

exec python3 -m verl.trainer.main_ppo \
  --config-path "$RECIPE" --config-name "$NAME" \
  +method="$METHOD" \
  actor_rollout_ref.model.path="$MODEL" \
  data.train_files="$TRAIN" \
  data.val_files="$VALIDATION" \
  actor_rollout_ref.rollout.name="$ROLLOUT" \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.default_local_dir="$OUTPUT/checkpoints" \
  trainer.experiment_name="$NAME-$METHOD" \
  "$@"
