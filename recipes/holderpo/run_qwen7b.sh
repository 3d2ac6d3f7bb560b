#!/usr/bin/env bash
# HölderPO with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec holderpo, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# 128 prompts x 8 responses, 8 updates on each rollout batch, p from 2 to -2 over the run.
set -xeuo pipefail
export RECIPE=holderpo
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-16}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-1024}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-3000}
WEIGHT_DECAY=${WEIGHT_DECAY:-0}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  actor_rollout_ref.actor.policy_loss.clip_level="${CLIP_LEVEL:-sequence}"
  actor_rollout_ref.actor.policy_loss.holder_p_schedule="${P_SCHEDULE:-linear_dec}"
  actor_rollout_ref.actor.policy_loss.holder_p_max="${P_MAX:-2.0}"
  actor_rollout_ref.actor.policy_loss.holder_p_min="${P_MIN:--2.0}"
)

launch "${METHOD[@]}" "$@"
