#!/usr/bin/env bash
# AVSPO with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec avspo, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# The paper trains on one prompt a step (8 responses on 8 GPUs), so that the batch's collapse rate is 0 or 1. At verl's usual
# batch sizes it is a rate, and the adaptive trigger stays silent until tau has come down to it (spec, section 6):
#   TRAIN_BATCH_SIZE=128 MINI_BATCH_SIZE=128 TRIGGER=always bash recipes/avspo/run_qwen7b.sh
set -xeuo pipefail
export RECIPE=avspo
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-1}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-1}
VAL_TEMPERATURE=${VAL_TEMPERATURE:-0.1}
VAL_DO_SAMPLE=${VAL_DO_SAMPLE:-True}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  algorithm.avspo.virtual_values="${VIRTUAL_VALUES:-stratified}"
  algorithm.avspo.r_anchor="${R_ANCHOR:-0.1}"
  algorithm.avspo.alpha="${ALPHA:-0.5}"
  algorithm.avspo.trigger="${TRIGGER:-adaptive}"
  algorithm.avspo.tau0="${TAU0:-0.5}"
  algorithm.avspo.tau_eta="${TAU_ETA:-0.01}"
  algorithm.avspo.acr_source="${ACR_SOURCE:-batch}"
)

launch "${METHOD[@]}" "$@"
