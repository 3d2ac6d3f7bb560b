#!/usr/bin/env bash
# run_qwen7b.sh with verl's Megatron engine in place of FSDP; same variables and arguments.
ENGINE=megatron exec bash "$(dirname "${BASH_SOURCE[0]}")/run_qwen7b.sh" "$@"
