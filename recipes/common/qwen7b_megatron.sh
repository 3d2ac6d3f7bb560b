# shellcheck shell=bash disable=SC2034  # arrays and variables are for the script that sources this
# As qwen7b.sh, with verl's Megatron engine in place of FSDP. Sourced by recipes/*/run_qwen7b.sh under ENGINE=megatron.
#
# Memory per GPU (estimate) at TP 2, PP 2, DP 2 with the distributed optimizer: weights and gradients 7.6e9 x (2 + 4) / 4 = 11 GB,
# optimizer 7.6e9 x 12 / 8 = 11 GB.
EXPERIMENT=${EXPERIMENT:-${RECIPE}_qwen7b_megatron}
OUT_DIR=${OUT_DIR:-outputs/${RECIPE}_qwen7b_megatron}
# shellcheck source=qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/qwen7b.sh"
export CUDA_DEVICE_MAX_CONNECTIONS=1

MODEL=(
  actor_rollout_ref.model.path="$MODEL_PATH"
  actor_rollout_ref.model.use_remove_padding=True
)

ACTOR+=(
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size="${TP:-2}"
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="${PP:-2}"
  actor_rollout_ref.actor.megatron.context_parallel_size="${CP:-1}"
  actor_rollout_ref.actor.megatron.sequence_parallel="${SEQUENCE_PARALLEL:-True}"
  actor_rollout_ref.actor.megatron.param_offload="${OFFLOAD:-False}"
  actor_rollout_ref.actor.megatron.optimizer_offload="${OFFLOAD:-False}"
)

REF+=(
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size="${TP:-2}"
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size="${PP:-2}"
  actor_rollout_ref.ref.megatron.context_parallel_size="${CP:-1}"
)

TRAINER+=(model_engine=megatron)
