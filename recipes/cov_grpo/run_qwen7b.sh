#!/usr/bin/env bash
# Covariance-aware GRPO with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec cov_grpo, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# The paper's model "7B" is unknown, and it trains with batches of 12 responses in HF TRL; the batch size here is verl's usual one.
set -xeuo pipefail
export RECIPE=cov_grpo
N=${N:-12}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-128}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-4096}
TEMPERATURE=${TEMPERATURE:-0.7}
LOSS_AGG_MODE=${LOSS_AGG_MODE:-token-mean}
TOTAL_STEPS=${TOTAL_STEPS:-100}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  algorithm.cov_grpo.scope="${SCOPE:-group}"
  algorithm.cov_grpo.logp="${LOGP:-old}"
  algorithm.cov_grpo.normalise="${NORMALISE:-true}"
)

launch "${METHOD[@]}" "$@"
