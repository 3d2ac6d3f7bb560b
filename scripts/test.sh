#!/usr/bin/env bash
# All tests, in the project's own environment: style, unit tests, then the end-to-end tests.
#
#   bash scripts/test.sh              everything
#   bash scripts/test.sh --unit       style and unit tests only
#   bash scripts/test.sh -k avspo     further arguments go to pytest
#   VERL_RECIPES_DATA=/folder         real data sets for the tests that use them (skipped without)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash scripts/setup.sh
export PATH="${VENV:-$ROOT/.venv}/bin:$PATH" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

unit_only=false
if [ "${1:-}" = --unit ]; then unit_only=true; shift; fi

ruff check .
ruff format --check .
# With arguments such as -k, one of the two phases may select nothing; pytest exits with 5 then.
phase() { python -m pytest -q "$@" || { local status=$?; [ "$status" = 5 ] && [ "$selected" = true ] || exit "$status"; }; }
selected=false
[ $# = 0 ] || selected=true

started=$SECONDS
phase -m "not e2e" -n 2 --dist loadfile "$@"
echo "unit tests: $((SECONDS - started)) s"
$unit_only && exit 0
started=$SECONDS
phase -m e2e --durations=0 "$@"
echo "end-to-end tests: $((SECONDS - started)) s"
