#!/usr/bin/env bash
# AVSPO on two CPU cores, from nothing to a report: see recipes/common/cpu.sh for the variables; "$@" are Hydra overrides.
# TRIGGER=adaptive is the paper's; with 32 groups in a batch it rarely fires within 40 steps (see the README), hence `always`.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/cpu.sh" avspo algorithm.avspo.trigger="${TRIGGER:-always}" "$@"
