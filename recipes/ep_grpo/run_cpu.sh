#!/usr/bin/env bash
# EP-GRPO on two CPU cores, from nothing to a report: see recipes/common/cpu.sh for the variables; "$@" are Hydra overrides.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/cpu.sh" ep_grpo "$@"
