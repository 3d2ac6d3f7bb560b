"""python -m verl_ext COMMAND ...: the tools around a run. Each command imports what it needs when it is called."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "doctor": (
        "verl_ext.doctor",
        "is everything in place? versions, plug-in, names in Ray workers, recipe configurations",
    ),
    "acr": ("verl_ext.acr_offline", "collapse rate of rollouts that verl dumped (trainer.rollout_data_dir)"),
    "probe": ("verl_ext.probe_view", "responses cut into segments, with the belief in the answer at each boundary"),
    "report": ("verl_ext.report", "table and curves of a run's metrics file, or of several runs"),
    "console": ("verl_ext.console", "run a training command: log to a file, one readable line per step"),
}


def main(argv: list[str]) -> int:
    lines = [f"  {name:<9}{text}" for name, (_, text) in COMMANDS.items()]
    usage = "\n".join(
        ["usage: python -m verl_ext COMMAND [OPTIONS]    (--help after a command: its options)", "", *lines]
    )
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"unknown command {argv[0]!r}\n{usage}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
