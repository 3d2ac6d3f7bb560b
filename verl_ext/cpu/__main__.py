"""`eval "$(python -m verl_ext.cpu)"`: shell lines that set what the CPU stack needs and is not set already."""

from __future__ import annotations

import shlex

from verl_ext.cpu.environment import environment

for name, value in environment().items():
    print(f"export {name}=${{{name}:-{shlex.quote(value)}}}")
