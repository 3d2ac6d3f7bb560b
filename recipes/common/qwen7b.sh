# shellcheck shell=bash disable=SC2034  # arrays and variables are for the script that sources this
# Arguments of a run of recipe $RECIPE with a 7B model on one machine of 8 GPUs (FSDP), as bash arrays.
# Sourced by recipes/*/run_qwen7b.sh, which sets what differs between recipes first. Every value is a variable with a default.
#
# Memory per GPU (estimate): weights bf16 and gradients fp32 of 7.6e9 parameters and two Adam moments in fp32, sharded 8 ways:
# 7.6e9 x (2 + 4 + 4 + 4 + 4) / 8 = 17 GB; vLLM at 0.5 of an 80 GB card takes 40 GB while the actor sleeps.
TRAIN_FILES=${TRAIN_FILES:-$HOME/data/math/train.parquet}
VAL_FILES=${VAL_FILES:-$HOME/data/math/test.parquet}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-Math-7B}
NNODES=${NNODES:-1}
N_GPUS=${N_GPUS:-8}
SEED=${SEED:-42}
# Absolute: verl's workers have working directories of their own. On several nodes: a folder that all of them share.
OUT_DIR=$(realpath -m "${OUT_DIR:-outputs/${RECIPE}_qwen7b}")
LOGGER=${LOGGER:-'[console,file]'}

DATA=(
  data.train_files="$TRAIN_FILES"
  data.val_files="$VAL_FILES"
  data.train_batch_size="${TRAIN_BATCH_SIZE:-128}"
  data.max_prompt_length="${MAX_PROMPT_LENGTH:-512}"
  data.max_response_length="${MAX_RESPONSE_LENGTH:-1024}"
  data.filter_overlong_prompts=True
  data.truncation=error
  data.seed="$SEED"
)

MODEL=(
  actor_rollout_ref.model.path="$MODEL_PATH"
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.model.enable_gradient_checkpointing=True
)

ACTOR=(
  actor_rollout_ref.actor.optim.lr="${LR:-1e-6}"
  actor_rollout_ref.actor.optim.weight_decay="${WEIGHT_DECAY:-0.01}"
  actor_rollout_ref.actor.optim.lr_warmup_steps="${LR_WARMUP_STEPS:-0}"
  actor_rollout_ref.actor.optim.clip_grad="${CLIP_GRAD:-1.0}"
  actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH_SIZE:-128}"
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${MAX_TOKENS_PER_GPU:-16384}"
  actor_rollout_ref.actor.clip_ratio_low="${CLIP_LOW:-0.2}"
  actor_rollout_ref.actor.clip_ratio_high="${CLIP_HIGH:-0.2}"
  actor_rollout_ref.actor.loss_agg_mode="${LOSS_AGG_MODE:-seq-mean-token-mean}"
  actor_rollout_ref.actor.use_kl_loss="${USE_KL_LOSS:-False}"
  actor_rollout_ref.actor.kl_loss_coef="${KL_LOSS_COEF:-0.001}"
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.data_loader_seed="$SEED"
)

ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n="${N:-8}"
  actor_rollout_ref.rollout.temperature="${TEMPERATURE:-1.0}"
  actor_rollout_ref.rollout.top_p=1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}"
  actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION:-0.5}"
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="${LOG_PROB_TOKENS_PER_GPU:-32768}"
  actor_rollout_ref.rollout.calculate_log_probs=True
  actor_rollout_ref.rollout.val_kwargs.temperature="${VAL_TEMPERATURE:-0}"
  actor_rollout_ref.rollout.val_kwargs.do_sample="${VAL_DO_SAMPLE:-False}"
)

REF=(
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="${LOG_PROB_TOKENS_PER_GPU:-32768}"
)

REWARD=(
  reward.custom_reward_function.path="${REWARD_PATH:-pkg://verl_ext.rewards}"
  reward.custom_reward_function.name="${REWARD_NAME:-compute_score}"
)

TRAINER=(
  trainer.logger="$LOGGER"
  trainer.experiment_name="${EXPERIMENT:-${RECIPE}_qwen7b}"
  trainer.n_gpus_per_node="$N_GPUS"
  trainer.nnodes="$NNODES"
  trainer.total_epochs="${TOTAL_EPOCHS:-1000}"
  trainer.total_training_steps="${TOTAL_STEPS:-500}"
  trainer.save_freq="${SAVE_FREQ:-50}"
  trainer.test_freq="${TEST_FREQ:-25}"
  trainer.val_before_train="${VAL_BEFORE_TRAIN:-True}"
  trainer.max_actor_ckpt_to_keep="${CKPT_TO_KEEP:-2}"
  trainer.default_local_dir="$OUT_DIR/checkpoints"
  hydra.run.dir="$OUT_DIR/hydra"
)

export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUT_DIR/metrics.jsonl}

# launch [override...]
launch() {
  python -m verl_ext.main --config-path "pkg://recipes.$RECIPE.config" --config-name "$RECIPE" \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REF[@]}" "${REWARD[@]}" "${TRAINER[@]}" "$@"
}
