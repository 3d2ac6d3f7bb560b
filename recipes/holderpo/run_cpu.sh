#!/usr/bin/env bash
# HölderPO on two CPU cores, from nothing to a report: see recipes/common/cpu.sh for the variables; "$@" are Hydra overrides.
# Four updates on each rollout batch: with one, the exponent has no effect.
UPDATES=${UPDATES:-4} exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/cpu.sh" holderpo "$@"
