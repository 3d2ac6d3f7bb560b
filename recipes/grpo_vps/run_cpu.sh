#!/usr/bin/env bash
# GRPO-VPS on two CPU cores, from nothing to a report: see recipes/common/cpu.sh for the variables; "$@" are Hydra overrides.
# Sums of several steps (LEVEL=steps), so that segments mean something. The tiny model writes `#` before its answer; its responses
# have a dozen tokens, hence the lower percentile. Rollouts and beliefs are kept: python -m verl_ext probe outputs/grpo_vps_cpu/rollouts
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export LEVEL=${LEVEL:-steps} RUN_DIR=${RUN_DIR:-$ROOT/outputs/grpo_vps_cpu}
exec bash "$ROOT/recipes/common/cpu.sh" grpo_vps \
  'algorithm.grpo_vps.probe_suffix="#"' 'algorithm.grpo_vps.probe_close=""' 'algorithm.grpo_vps.answer_cue="#"' \
  algorithm.grpo_vps.n=1 algorithm.grpo_vps.percentile=70 algorithm.grpo_vps.probe_layout=packed \
  trainer.rollout_data_dir="$RUN_DIR/rollouts" "$@"
