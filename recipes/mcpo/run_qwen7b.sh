#!/usr/bin/env bash
# MCPO with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec mcpo, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# The paper discloses no training settings; these are those of verl's DAPO recipe: 512 prompts, 16 updates on each rollout batch.
set -xeuo pipefail
export RECIPE=mcpo
N=${N:-16}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-32}
CLIP_HIGH=${CLIP_HIGH:-0.28}
LR_WARMUP_STEPS=${LR_WARMUP_STEPS:-10}
WEIGHT_DECAY=${WEIGHT_DECAY:-0.1}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  algorithm.mcpo.reweight="${REWEIGHT:-true}"
  algorithm.mcpo.hkl_beta="${HKL_BETA:-1.0}"
  algorithm.mcpo.hkl_delta="${HKL_DELTA:-0.01}"
  algorithm.mcpo.hkl_norm="${HKL_NORM:-sequences}"
)

launch "${METHOD[@]}" "$@"
