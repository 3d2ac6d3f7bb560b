#!/usr/bin/env bash
# EP-GRPO with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec ep_grpo, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# Learning rate, batch, lengths and clip are unknown; those here are the collection's. The reference model is needed for the method
# itself, with or without a KL term.
set -xeuo pipefail
export RECIPE=ep_grpo
USE_KL_LOSS=${USE_KL_LOSS:-True}
KL_LOSS_COEF=${KL_LOSS_COEF:-0}
LOSS_AGG_MODE=${LOSS_AGG_MODE:-token-mean}
TOTAL_STEPS=${TOTAL_STEPS:-1000}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  algorithm.ep_grpo.gamma="${GAMMA:-5.0}"
  algorithm.ep_grpo.eta="${ETA:-0.2}"
  algorithm.ep_grpo.lam="${LAM:-0.1}"
  algorithm.ep_grpo.K="${BUCKETS:-10}"
  algorithm.ep_grpo.bucket_norm="${BUCKET_NORM:-zscore}"
  algorithm.ep_grpo.eta_warmup_steps="${ETA_WARMUP_STEPS:-0}"
)

launch "${METHOD[@]}" "$@"
