"""Run a training command, keep its whole output in a log file, and show a person one line per step.

    python -m verl_ext console --log FILE --metrics FILE [--title T] -- COMMAND ...

The command runs in a session of its own, so that it, Ray and the engines can be told from everything else on the
machine: what is left of that session when the command ends is stopped, and its shared memory removed. Ctrl-C or SIGTERM
is passed on once; a second one kills.
The exit status is the command's (128 + n after signal n).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl_ext.cpu import leftovers
from verl_ext.diagnosis import ANSI, diagnosis, split_source
from verl_ext.report import SERIES, is_record, pick, validation

PHASES = {  # a line of the log that begins a phase of the start-up -> what is going on from then on
    r"ray init kwargs:": "starting Ray",
    r"Started a local Ray instance|Connected to Ray cluster": "starting the trainer, reading the data",
    r"create worker group": "loading the model in the training engine",
    r"actor and ref model engine initialized": "starting vLLM (the longest part)",
    r"checkpoint engine manager initialized": "starting the agent loop, first weight synchronisation",
    r"Creating file logger": "validation, then the first step",
}
TOTAL = re.compile(r"Total training steps: (\d+)")
COLUMNS = {  # heading -> what of report.SERIES, digits
    "reward": ("reward", 3),
    "collapsed: raw": ("collapse rate, raw", 3),
    "after": ("collapse rate, after injection", 3),
    "all-wrong": ("all-wrong groups", 3),
    "all-correct": ("all-correct groups", 3),
    "entropy": ("entropy", 3),
    "seconds": ("seconds per step", 1),
}
HEADER = "  ".join(f"{name:>9}" for name in ["step", *COLUMNS])


def step_line(step: int, total: int | None, data: dict) -> str:
    """One step's numbers under HEADER; what was not recorded is `-`."""
    cells = [f"{step}/{total}".rjust(9) if total else f"{step:9}"]
    for heading, (name, digits) in COLUMNS.items():
        value = pick(data, SERIES[name])
        cells.append(("-" if value is None else f"{value:.{digits}f}").rjust(max(9, len(heading))))
    return "  ".join(cells)


def session_members(session: int) -> list[int]:
    """Processes of a session, without zombies."""
    members = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members.append(int(entry))
    return members


def stop_session(session: int, patience: float = 3.0, grace: float = 8.0) -> int:
    """Wait a little for what is left of a session to end, then ask it to, then kill it. Returns how many were asked."""

    def wait(seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while (left := session_members(session)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    left = stopped = wait(patience)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        left = wait(grace) if left else left
    return len(stopped)


class Console:
    """What a person sees. On a terminal the last line ticks; elsewhere a line appears every `every` seconds."""

    def __init__(self, every: float = 15.0):
        self.start = time.monotonic()
        self.tty = sys.stdout.isatty()
        self.every = every
        self.phase, self.phase_start, self.ticked = "starting", self.start, self.start
        self.step, self.total, self.rows = 0, None, 0
        self.warned: set[str] = set()

    def say(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self.tty else text, flush=True)
        self.ticked = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        text = f"{now - self.start:5.0f} s  {self.phase} ... {now - self.phase_start:.0f} s"
        if self.tty:
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif now - self.ticked >= (self.every if not self.step else 60):
            self.say(text)

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase, self.phase_start = phase, time.monotonic()
            if not self.step and not self.tty:
                self.say(f"{self.phase_start - self.start:5.0f} s  {phase}")

    def log_line(self, raw: str) -> None:
        _, line = split_source(raw)
        total = TOTAL.search(line)
        self.total = int(total[1]) if total else self.total
        if line.startswith("verl_ext:") and line not in self.warned:  # ours; the same from many workers counts once
            self.warned.add(line)
            self.say(line)
        if not self.step:
            for pattern, phase in PHASES.items():
                if re.search(pattern, line):
                    self.enter(phase)

    def metrics_record(self, record: dict) -> None:
        step, data = record["step"], record["data"]
        if any(not key.startswith("val-") for key in data):
            if self.rows % 20 == 0:
                self.say(HEADER)
            self.say(step_line(step, self.total, data))
            self.step, self.rows = step, self.rows + 1
            self.enter("finishing" if step == self.total else f"step {step + 1}")
        for name, value in validation(data).items():
            self.say(f"      validation at step {step}: {name} = {value:.3f}")


class MetricsTail:
    """Records appended to a metrics file from now on; begins anew when the file is replaced or overwritten."""

    def __init__(self, path: Path):
        self.path = path
        self.inode, self.offset = (path.stat().st_ino, path.stat().st_size) if path.exists() else (0, 0)

    def read(self) -> list[dict]:
        """Complete new lines. `report` complains about what is not a record: watching must not stop a run."""
        try:
            with self.path.open("rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self.inode or now.st_size < self.offset:
                    self.inode, self.offset = now.st_ino, 0
                file.seek(self.offset)
                chunk = file.read()
        except FileNotFoundError:
            return []
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self.offset += len(complete)
        records = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError):
                records += [record for record in [json.loads(line)] if is_record(record)]
        return records


def supervise(command: Sequence[str], log: Path, metrics: Path, title: str = "", stall: float = 600.0) -> int:
    """Run `command` and show it; see the module. Returns the exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    metrics.parent.mkdir(parents=True, exist_ok=True)
    console, tail, segments = Console(), MetricsTail(metrics), leftovers.segments()
    console.say(f"{title + ': ' if title else ''}the whole output goes to {log}")
    child: subprocess.Popen | None = None
    signals: list[int] = []

    def pass_on(signum, _frame):
        signals.append(signum)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signum if len(signals) == 1 else signal.SIGKILL)

    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        wanted.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, pass_on) for signum in wanted}
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics.resolve()), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        with log.open("w", encoding="utf-8") as sink:
            _watch(child, console, sink, tail, stall, signals)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        if child is not None:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            if left := stop_session(child.pid):
                console.say(f"stopped {left} process{'es' * (left > 1)} that the run left behind")
            child.wait()
            child.stdout.close()
            leftovers.cleanup(before=segments)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    took = f"{time.monotonic() - console.start:.0f} s"
    if signals:
        console.say(f"stopped by {signal.Signals(signals[0]).name} after {took}, at step {console.step}; log: {log}")
        return status or 128 + signals[0]
    if status:
        where = f"in step {console.step + 1}" if console.step else f"during: {console.phase}"
        why = diagnosis(log.read_text(encoding="utf-8"), status)
        console.say(f"FAILED with exit status {status} after {took}, {where}:\n{why}\n  log: {log.resolve()}")
    else:
        console.say(f"finished after {took}, {console.rows} steps")
    return status


def _watch(
    child: subprocess.Popen, console: Console, sink, tail: MetricsTail, stall: float, signals: list[int]
) -> None:
    """Copy the child's output to `sink` and feed the console until the child has ended and its output is read."""
    os.set_blocking(child.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(child.stdout, selectors.EVENT_READ)
    heard, pending, told = time.monotonic(), b"", 0
    while True:
        ended = child.poll() is not None  # asked before reading, so that nothing written until then is missed
        chunk = b""
        if not selector.get_map():
            time.sleep(0 if ended else 0.25)
        elif selector.select(timeout=0 if ended else 0.25):
            chunk = child.stdout.read(1 << 20) or b""
            if not chunk:  # closed at its end
                selector.unregister(child.stdout)
        *lines, pending = re.split(rb"\r\n|\n|\r", pending + chunk)
        finished = ended and not chunk
        for line in [*lines, pending] if finished and pending else lines:
            text = ANSI.sub("", line.decode(errors="replace"))
            sink.write(text + "\n")
            console.log_line(text)
        sink.flush()
        for record in tail.read():
            console.metrics_record(record)
        if len(signals) > told:
            told = len(signals)
            console.say("stopping; a second Ctrl-C kills" if told == 1 else "killing")
        if chunk:
            heard = time.monotonic()
        elif time.monotonic() - heard > stall:
            heard = time.monotonic()
            console.say(f"no output for {stall:.0f} s: it may hang (a failed weight synchronisation waits for ever)")
        if finished:
            return
        console.tick()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_ext console", description="Run training, readably.")
    parser.add_argument("--log", type=Path, required=True, help="file for the whole output")
    parser.add_argument("--metrics", type=Path, required=True, help="file that verl's `file` logger writes")
    parser.add_argument("--title", default="")
    parser.add_argument("--stall", type=float, default=600.0, help="say so after this many seconds without output")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given: ... -- COMMAND ARGUMENTS")
    return supervise(command, args.log, args.metrics, args.title, args.stall)


if __name__ == "__main__":
    sys.exit(main())
