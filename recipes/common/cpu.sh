# shellcheck shell=bash
# Runs recipe $1 on the CPU, end to end: environment, tiny model, data, training, report. Called by recipes/*/run_cpu.sh.
# Further arguments are Hydra overrides. Variables (defaults in brackets):
#   RUN_DIR      everything the run writes [outputs/<recipe>_cpu]
#   STEPS, SEED  training steps [40], seed of data order and sampling [0]
#   LEVEL        level of the arithmetic task: easy, medium, hard, mixed, steps (running sums written out), words [mixed]
#   LR, BATCH    learning rate [2e-4], prompts per step [32]
#   UPDATES      optimiser updates on the prompts of a step [1; more where the method needs it]
#   MODEL_PATH   a model folder instead of the tiny model; then LEVEL is words, LR 1e-5, BATCH 4, with longer prompts and responses
#   TRAIN_FILES, VAL_FILES, REWARD   parquet files and reward function (module:function) instead of the arithmetic task
#   VENV, PYTHON, TORCH_INDEX_URL    see scripts/setup.sh
set -euo pipefail

RECIPE=$1; shift
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ ! -e "$ROOT/scripts/setup.sh" ]; then
  echo "run_cpu.sh needs a clone of the repository (it makes its own environment, model and data). In an environment of your own:" >&2
  echo "  python -m verl_ext.main --config-path pkg://recipes.$RECIPE.config --config-name $RECIPE ..." >&2
  exit 1
fi
STEPS=${STEPS:-40}
SEED=${SEED:-0}
UPDATES=${UPDATES:-1}
MODEL_PATH=${MODEL_PATH:-}
if [ -n "$MODEL_PATH" ]; then
  LEVEL=${LEVEL:-words} LR=${LR:-1e-5} BATCH=${BATCH:-4}
  SIZES=(
    data.max_prompt_length=256 data.max_response_length=32 actor_rollout_ref.rollout.max_model_len=2048
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=512
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048
  )
else
  LEVEL=${LEVEL:-mixed} LR=${LR:-2e-4} BATCH=${BATCH:-32}
  SIZES=(data.max_prompt_length=32 data.max_response_length="$([ "$LEVEL" = steps ] && echo 24 || echo 8)")
fi
RUN_DIR=${RUN_DIR:-$ROOT/outputs/${RECIPE}_cpu}

refuse() { echo "run_cpu.sh: $*" >&2; exit 1; }
case $STEPS in *[!0-9]* | '' | 0) refuse "STEPS=$STEPS must be a whole number of at least 1" ;; esac
case $UPDATES in *[!0-9]* | '' | 0) refuse "UPDATES=$UPDATES must be a whole number of at least 1" ;; esac
case $BATCH in *[!0-9]* | '' | 0) refuse "BATCH=$BATCH must be a whole number of at least 1" ;; esac
[ $((BATCH % UPDATES)) = 0 ] || refuse "BATCH=$BATCH does not divide into UPDATES=$UPDATES mini-batches. Make BATCH a multiple."
case $SEED in *[!0-9]* | '') refuse "SEED=$SEED must be a whole number" ;; esac
case $LEVEL in
  easy | medium | hard | mixed | steps) ;;
  words) [ -n "$MODEL_PATH" ] || refuse "LEVEL=words asks in words, which the tiny model cannot read. Set MODEL_PATH, or another LEVEL." ;;
  *) refuse "LEVEL=$LEVEL is not one of easy, medium, hard, mixed, words, steps" ;;
esac
if [ -n "${TRAIN_FILES:-}" ] && [ -z "${VAL_FILES:-}" ]; then
  refuse "TRAIN_FILES is set, but VAL_FILES is not. Set both."
fi
for path in "$RUN_DIR" "$MODEL_PATH" "${TRAIN_FILES:-}" "${VAL_FILES:-}"; do
  case $path in *[,=\'\"\#\(\)\[\]\{\}]*) refuse "the path $path holds a character that has a meaning in Hydra overrides. Use another path." ;; esac
done

bash "$ROOT/scripts/setup.sh"
export PATH="${VENV:-$ROOT/.venv}/bin:$PATH"
eval "$(python -m verl_ext.cpu)"
mkdir -p "$RUN_DIR"
RUN_DIR=$(cd "$RUN_DIR" && pwd)
take_lock() {
  exec 8>"$RUN_DIR/.lock"
  flock -n 8 || { echo "run_cpu.sh: another run is writing to $RUN_DIR. Wait for it, or set RUN_DIR." >&2; exit 1; }
}
take_lock

# An interrupted run with these settings is taken up at its last checkpoint; any other run that is here makes way.
settings="recipe=$RECIPE seed=$SEED level=$LEVEL lr=$LR batch=$BATCH updates=$UPDATES model=${MODEL_PATH:-tiny} data=${TRAIN_FILES:-$LEVEL} val=${VAL_FILES:-$LEVEL} reward=${REWARD:-} $*"
done_steps=$(cat "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ -e "$RUN_DIR/settings.txt" ]; then
  if [ "$done_steps" -ge "$STEPS" ] || [ "$(cat "$RUN_DIR/settings.txt")" != "$settings" ]; then
    n=1
    while [ -e "$RUN_DIR.$n" ]; do n=$((n + 1)); done
    mv "$RUN_DIR" "$RUN_DIR.$n"
    echo "run_cpu.sh: the earlier run is now in $RUN_DIR.$n"
    mkdir -p "$RUN_DIR"
    take_lock
  elif [ "$done_steps" -gt 0 ]; then
    echo "run_cpu.sh: taking up the interrupted run in $RUN_DIR at step $done_steps"
  fi
elif [ "$done_steps" -gt 0 ]; then
  echo "run_cpu.sh: $RUN_DIR holds a checkpoint of step $done_steps; going on from it"
fi
echo "$settings" >"$RUN_DIR/settings.txt"

if [ -z "$MODEL_PATH" ]; then
  case $LEVEL in steps) task=steps MODEL_PATH=$ROOT/outputs/tiny/large-steps ;; *) task=sums MODEL_PATH=$ROOT/outputs/tiny/large ;; esac
  python "$ROOT/scripts/make_tiny_model.py" --size large --task "$task" --out "$ROOT/outputs/tiny"
fi
data_name=$(basename "$(dirname "${TRAIN_FILES:-x/$LEVEL/x}")")
if [ -z "${TRAIN_FILES:-}" ]; then
  python -m verl_ext.tasks --level "$LEVEL" --out "$ROOT/outputs/data/$LEVEL"
  TRAIN_FILES=$ROOT/outputs/data/$LEVEL/train.parquet
  VAL_FILES=$ROOT/outputs/data/$LEVEL/val.parquet
fi
REWARD=${REWARD:-verl_ext.tasks:arithmetic_score}

export VERL_FILE_LOGGER_PATH=$RUN_DIR/metrics.jsonl
python -m verl_ext console --log "$RUN_DIR/train.log" --metrics "$VERL_FILE_LOGGER_PATH" --title "$RECIPE on the CPU" -- \
  python -m verl_ext.main --config-path "pkg://recipes.$RECIPE.config" --config-name "$RECIPE" +scale=cpu \
  data.train_files="$TRAIN_FILES" data.val_files="$VAL_FILES" data.seed="$SEED" \
  data.train_batch_size="$BATCH" actor_rollout_ref.actor.ppo_mini_batch_size="$((BATCH / UPDATES))" "${SIZES[@]}" \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr="$LR" actor_rollout_ref.actor.data_loader_seed="$SEED" actor_rollout_ref.rollout.seed="$SEED" \
  actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn_agent \
  reward.custom_reward_function.path="pkg://${REWARD%%:*}" reward.custom_reward_function.name="${REWARD##*:}" \
  actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
  trainer.total_training_steps="$STEPS" trainer.test_freq="$STEPS" trainer.save_freq=10 trainer.max_actor_ckpt_to_keep=2 trainer.total_epochs=1000000 \
  trainer.default_local_dir="$RUN_DIR/checkpoints" \
  hydra.run.dir="$RUN_DIR/hydra" "$@"
python -m verl_ext report "$VERL_FILE_LOGGER_PATH" --out "$RUN_DIR" --title "$RECIPE, $data_name, seed $SEED" \
  --log "$RUN_DIR/train.log" --checkpoint "$RUN_DIR/checkpoints/global_step_$STEPS"
