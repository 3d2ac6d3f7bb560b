"""Why a training command failed, from its log: the last exceptions, without their hundreds of lines, and a hint."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
SOURCE = re.compile(r"^((?:\((?:[\w:.\[\]-]+ )?pid=\d+(?:, ip=[^)]*)?\)(?: |$))+)")  # Ray's and vLLM's line prefixes
FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)')
EXCEPTION = re.compile(  # the line that ends a traceback: `package.SomeError: text`
    r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Interrupt|Exit|Timeout|Died|Failed\w*)\b(?:\(\w+\))?(?::|$)"
)
# Ray prints the latter for an actor that dies in its constructor.
BEGIN = ("Traceback (most recent call last)", "Exception raised in creation task")
NOT_A_MESSAGE = re.compile(  # a line after it that does not go on with its text
    r"^\s*$|^\d{4}-\d\d-\d\d|^(?:INFO|WARNING|ERROR|DEBUG)\b|^Traceback|^During|^The above|^\[|^verl_ext:"
)
HINTS = {  # what verl, Ray or the system say -> what it means and what to do
    r"empty list as keys|no materializable trajectories": (
        "rollouts of a whole group or batch failed; the cause is what the agent-loop worker says above"
    ),
    r"Unknown advantage estimator|Unsupported loss mode|Unknown trainer|Unknown platform": (
        "the name is not registered in that process: run `python -m verl_ext doctor`"
    ),
    r"is not in struct|Could not override": "no such configuration key: check its spelling (`--cfg job` prints all)",
    r"No space left on device": "disk or /dev/shm is full: `df -h . /tmp /dev/shm`",
    r"Address already in use": "a port is taken, perhaps by an earlier run: `ss -ltnp` names the process",
    r"OutOfMemory|out of memory|memory monitor|Cannot allocate memory|SIGKILL|exit status -9": (
        "out of memory: smaller data.train_batch_size or micro-batches, or stop what else is running"
    ),
    r"RayActorError|ActorDiedError": "a worker process died; its last lines in the log say why",
}


@dataclass
class Failure:
    """The end of one traceback: who printed it (empty: the driver), the exception's text, its innermost frame."""

    source: str
    message: str
    place: str


def split_source(line: str) -> tuple[str, str]:
    """`(TaskRunnerV1 pid=7) text` -> ("TaskRunnerV1 pid=7", "text"); the source is empty for the driver."""
    match = SOURCE.match(line)
    return (match[1].strip()[1:-1], line[match.end() :]) if match else ("", line)


def failures(lines: Sequence[str]) -> list[Failure]:
    """Every traceback's final exception, in order of appearance.

    Processes write into one another's tracebacks, so each source is followed on its own. Ray's RayTaskError is passed
    over for the exception it carries.
    """
    found: list[Failure] = []
    place: dict[str, str] = {}  # source inside a traceback -> its innermost frame so far
    going_on: dict[str, Failure] = {}  # source -> failure whose message may have further lines
    for raw in lines:
        source, line = split_source(raw)
        if line.startswith(BEGIN):
            place[source] = ""
            going_on.pop(source, None)
        elif source in place:
            frame = FRAME.match(line)
            if frame:
                place[source] = f"{frame[1]}:{frame[2]} in {frame[3]}"
            elif EXCEPTION.match(line) and "RayTaskError" not in line:
                going_on[source] = Failure(source, line, place.pop(source))
                found.append(going_on[source])
        elif source in going_on:
            if NOT_A_MESSAGE.match(line) or going_on[source].message.count("\n") >= 5:
                del going_on[source]
            else:
                going_on[source].message += "\n" + line
    return found


def diagnosis(log: str, status: int) -> str:
    """Text for a person: what the driver died of, what other processes reported before, and a hint where one is known.

    Args:
        log: the whole output. status: exit status of the command, 128 + n after signal n.
    """
    lines = ANSI.sub("", log).splitlines()
    distinct: dict[str, Failure] = {}
    for failure in failures(lines):  # one exception travels through several processes: where it was last seen counts
        distinct.pop(failure.message, None)
        distinct[failure.message] = failure
    driver = [failure for failure in distinct.values() if not failure.source]
    others = [failure for failure in distinct.values() if failure.source]
    out: list[str] = []
    if not driver:  # a refused configuration, or killed
        out += [line[:300] for line in lines if line.strip() and not split_source(line)[0]][-8:] or ["(no output)"]
    for failure in (others + driver)[-3:][::-1]:
        out += failure.message.splitlines()
        place = [failure.place and f"at {failure.place}", failure.source and f"({failure.source})"]
        out += ["    " + " ".join(filter(None, place))] if any(place) else []
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, "\n".join(out))]
    if status == 128 + signal.SIGKILL and not hints:
        hints = ["killed from outside (SIGKILL), usually because the system ran out of memory: `dmesg | tail`"]
    if any("agent-loop" in hint for hint in hints) and not others:
        worker = [line[:300] for line in lines if "AgentLoopWorker" in line]
        out += [line for line in worker if re.search("error|exception|fail", line, re.IGNORECASE)][-8:]
    return "\n".join([*(f"  {line}" for line in out), *(f"  hint: {hint}" for hint in hints)])
