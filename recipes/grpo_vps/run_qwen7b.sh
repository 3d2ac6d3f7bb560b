#!/usr/bin/env bash
# GRPO-VPS with Qwen2.5-Math-7B on 8 GPUs, settings of the paper where it gives them (spec grpo_vps, section 8); the README
# lists where each comes from. "$@" are Hydra overrides; `--cfg job` prints the configuration instead of running it.
#
# MODEL_PATH=Qwen/Qwen2.5-Math-1.5B is the paper's other model. Percentile, probe text, KL and clip are unknown; those here are the
# collection's. The batched probe takes some four times the tokens of the old-log-prob pass.
set -xeuo pipefail
export RECIPE=grpo_vps
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-512}
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-128}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-3072}
LOSS_AGG_MODE=${LOSS_AGG_MODE:-token-mean}
VAL_TEMPERATURE=${VAL_TEMPERATURE:-1.0}
VAL_DO_SAMPLE=${VAL_DO_SAMPLE:-True}
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

METHOD=(
  algorithm.grpo_vps.alpha="${ALPHA:-1.2}"
  algorithm.grpo_vps.n="${CUTS_PER_SEGMENT:-4}"
  algorithm.grpo_vps.percentile="${PERCENTILE:-97}"
  algorithm.grpo_vps.max_segments="${MAX_SEGMENTS:-8}"
  algorithm.grpo_vps.prob="${PROB:-joint}"
  algorithm.grpo_vps.probe_layout="${PROBE_LAYOUT:-batched}"
)

launch "${METHOD[@]}" "$@"
