#!/usr/bin/env bash
# GRPO, the baseline, with Qwen2.5-Math-7B on 8 GPUs. "$@" are Hydra overrides; `--cfg job` prints the configuration.
set -xeuo pipefail
export RECIPE=grpo
# shellcheck source=../common/qwen7b.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/qwen7b${ENGINE:+_$ENGINE}.sh"

launch "$@"
