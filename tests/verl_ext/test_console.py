"""The console against small commands: what a person sees, what is kept, how it ends, that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from verl_ext.console import HEADER, MetricsTail, session_members, step_line, supervise
from verl_ext.diagnosis import diagnosis, failures, split_source

ROOT = Path(__file__).resolve().parents[2]

TRAINING = r"""
import json, os, time
say = lambda text: print(text, flush=True)
out = open(os.environ["VERL_FILE_LOGGER_PATH"], "wb", buffering=0)
def log(step, data):
    out.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
say("ray init kwargs: {}")
say("\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m INFO:2026-01-01 00:00:00,000:Total training steps: 2")
say("\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m verl_ext: acr/rate has been high")
say("\x1b[36m(TaskRunnerV1 pid=8)\x1b[0m verl_ext: acr/rate has been high")
log(0, {"val-core/sums/acc/mean@1": 0.25, "val-aux/num_turns/min": 2})
print("Loading:  10%\rLoading: 100%", flush=True)
log(1, {"critic/score/mean": 0.5, "acr/rate": 0.25, "acr/post": 0.0, "acr/wrong": 0.125, "acr/correct": 0.125,
        "actor/entropy": None, "timing_s/step": 3.14})
log(2, {"critic/rewards/mean": 0.75, "val-core/sums/acc/mean@1": 0.875})
out.write(b"not a record\n")
say("step:2 - " + "critic/score/mean:np.float64(0.75) - " * 30)
print("no newline at the end", end="")
"""

FAILURE = """\
(pid=5) Traceback (most recent call last):
(pid=5)   File "/x/plugin.py", line 1, in load
(pid=5) AttributeError: module 'other' has no attribute 'thing'
(pid=5) INFO:2026-01-01 00:00:00,000:going on without it
\x1b[36m(AgentLoopWorkerTQ pid=9)\x1b[0m Traceback (most recent call last):
\x1b[36m(AgentLoopWorkerTQ pid=9)\x1b[0m   File "/x/reward.py", line 2, in compute_score
\x1b[36m(WorkerDict pid=10)\x1b[0m Loading weights: 100%
\x1b[36m(AgentLoopWorkerTQ pid=9)\x1b[0m     raise KeyError("no such field: answer")
\x1b[36m(AgentLoopWorkerTQ pid=9)\x1b[0m KeyError: 'no such field: answer'
Error executing job with overrides: ['a=1']
Traceback (most recent call last):
  File "/x/main_ppo.py", line 94, in run_ppo
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunnerV1.run() (pid=7, ip=10.0.0.1)
  File "/x/replay_buffer.py", line 510, in sample
    raise RuntimeError("empty list as keys")
RuntimeError: empty list as keys
which is a message of two lines

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""


@pytest.fixture
def watch(tmp_path, capsys):
    """Run a Python script under the console, in this process; returns (status, what was shown, the log)."""

    def run(script: str, **options):
        path = tmp_path / "child.py"
        path.write_text(textwrap.dedent(script))
        command = [sys.executable, str(path)]
        status = supervise(command, tmp_path / "run.log", tmp_path / "metrics.jsonl", **options)
        return status, capsys.readouterr().out, (tmp_path / "run.log").read_text()

    return run


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_success_shows_steps_and_keeps_everything(watch):
    status, shown, log = watch(TRAINING, title="toy")
    assert status == 0
    lines = shown.splitlines()
    assert lines[0].startswith("toy: ") and any(line.endswith("starting Ray") for line in lines)
    assert "      validation at step 0: sums acc mean@1 = 0.250" in lines
    at = lines.index(HEADER)
    assert lines[at + 1].split() == ["1/2", "0.500", "0.250", "0.000", "0.125", "0.125", "-", "3.1"]
    assert lines[at + 2].split() == ["2/2", "0.750", "-", "-", "-", "-", "-", "-"]
    assert lines[at + 3].endswith("validation at step 2: sums acc mean@1 = 0.875")
    assert lines[-1].startswith("finished after") and lines[-1].endswith("2 steps")
    assert shown.count("acr/rate has been high") == 1, "our own warning is shown, once"
    assert "np.float64" not in shown and max(map(len, lines)) < 160
    assert "\x1b" not in log and "(TaskRunnerV1 pid=7) INFO" in log
    assert "Loading:  10%\nLoading: 100%\n" in log and log.endswith("no newline at the end\n")
    assert log.count("np.float64") == 30


def test_columns_line_up():
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", HEADER)]
    row = step_line(
        12, 400, {"critic/score/mean": 0.5, "acr/rate": 0.25, "actor/entropy": 12.3456, "timing_s/step": 1000}
    )
    assert [match.end() for match in re.finditer(r"\S+", row)] == ends


def test_header_is_repeated(watch):
    _, shown, _ = watch(
        """
        import json, os
        with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as out:
            for step in range(1, 46):
                print(json.dumps({"step": step, "data": {"critic/score/mean": 0.1}}), file=out)
        """
    )
    assert shown.count(HEADER) == 3


def test_earlier_metrics_are_not_shown_again(watch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 99, "data": {"critic/score/mean": 0.9}}\n' * 50)
    _, shown, _ = watch(TRAINING)
    assert "99" not in shown.split(HEADER)[1] and "1/2" in shown


def test_tail_follows_a_replaced_and_a_truncated_file(tmp_path):
    path = tmp_path / "m.jsonl"
    record = lambda step: json.dumps({"step": step, "data": {}}) + "\n"  # noqa: E731
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text(record(1) + record(2)[:5])
    assert [r["step"] for r in tail.read()] == [1]
    with path.open("a") as file:
        file.write(record(2)[5:])
    assert [r["step"] for r in tail.read()] == [2]
    path.rename(tmp_path / "m.1.jsonl")
    path.write_text(record(3) * 3)
    assert [r["step"] for r in tail.read()] == [3, 3, 3]
    path.write_text(record(4))
    assert [r["step"] for r in tail.read()] == [4]


def test_failure_gives_status_and_cause(watch):
    status, shown, _ = watch(f"import sys\nprint({FAILURE!r})\nsys.exit(3)")
    assert status == 3
    told = shown[shown.index("FAILED") :]
    assert "FAILED with exit status 3" in told and "during: starting" in told
    lines = [line.strip() for line in told.splitlines()[1:]]
    assert lines[:3] == [
        "RuntimeError: empty list as keys", "which is a message of two lines", "at /x/replay_buffer.py:510 in sample",
    ]  # fmt: skip
    assert lines[3:5] == [
        "KeyError: 'no such field: answer'", "at /x/reward.py:2 in compute_score (AgentLoopWorkerTQ pid=9)",
    ]  # fmt: skip
    assert any(line.startswith("hint:") and "agent-loop worker" in line for line in lines)
    assert len(lines) < 15 and "RayTaskError" not in told and "HYDRA_FULL_ERROR" not in told


def test_failures_are_followed_per_process():
    found = [(f.source, f.message.split(":")[0]) for f in failures(re.sub(r"\x1b\[\d+m", "", FAILURE).splitlines())]
    assert found == [("pid=5", "AttributeError"), ("AgentLoopWorkerTQ pid=9", "KeyError"), ("", "RuntimeError")]


@pytest.mark.parametrize(
    "line, source",
    [
        ("(TaskRunnerV1 pid=7) text", "TaskRunnerV1 pid=7"),
        ("(WorkerDict pid=7, ip=10.0.0.1) text", "WorkerDict pid=7, ip=10.0.0.1"),
        ("(vLLMHttpServer pid=6) (Worker pid=8) text", "vLLMHttpServer pid=6) (Worker pid=8"),
        ("(pid=7) text", "pid=7"),
        ("(not a source) text", ""),
    ],
)
def test_split_source(line, source):
    assert split_source(line) == (source, "text" if source else line)


@pytest.mark.parametrize(
    "log, hint",
    [
        ("Could not override 'algorithm.x'.\nKey 'x' is not in struct", "check its spelling"),
        (
            "Traceback (most recent call last):\nValueError: Unknown advantage estimator simply: avspoo",
            "verl_ext doctor",
        ),
        ("Traceback (most recent call last):\nOSError: [Errno 28] No space left on device", "df -h"),
        ("Traceback (most recent call last):\nOSError: [Errno 98] Address already in use", "ss -ltnp"),
    ],
)
def test_known_symptoms_are_translated(log, hint):
    text = diagnosis(log, 1)
    assert hint in text and log.splitlines()[-1] in text


def test_refused_configuration_is_shown_although_a_worker_failed_before():
    log = "(pid=5) Traceback (most recent call last):\n(pid=5) KeyError: 'x'\nverl_ext: not started:\n  - n=1: too few"
    text = diagnosis(log, 1)
    assert "n=1: too few" in text and "KeyError" in text


def test_kill_from_outside_is_explained(watch):
    status, shown, _ = watch("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert status == 128 + signal.SIGKILL and "out of memory" in shown


def test_command_that_is_not_there(tmp_path, capsys):
    assert supervise(["/no/such/command"], tmp_path / "run.log", tmp_path / "m.jsonl") == 127
    assert "cannot run /no/such/command" in capsys.readouterr().err


def test_stall_is_told_and_the_run_goes_on(watch):
    status, shown, log = watch("import time\nprint('a', flush=True)\ntime.sleep(2)\nprint('b')", stall=0.8)
    assert status == 0 and "no output for 1 s" in shown and log == "a\nb\n"


def test_what_the_run_leaves_behind_is_stopped(watch, tmp_path):
    status, shown, _ = watch(
        f"""
        import os, subprocess, sys
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
        open({str(tmp_path / "pid")!r}, "w").write(str(sleeper.pid))
        """
    )
    assert status == 0 and "stopped 1 process that the run left behind" in shown
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z", "at most waiting to be reaped"


INTERRUPTED = """
import pathlib, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("asked to stop", flush=True)
    if "stubborn" in sys.argv:
        time.sleep(600)
    sleeper.kill()
    sys.exit(7)
"""


@pytest.fixture
def interrupted(tmp_path):
    """Start the console as a process of its own, wait until its child is ready."""
    started = []

    def start(*arguments: str):
        (tmp_path / "child.py").write_text(INTERRUPTED)
        log = tmp_path / "run.log"
        command = [sys.executable, "-m", "verl_ext", "console", "--log", log, "--metrics", tmp_path / "m.jsonl", "--"]
        process = subprocess.Popen(
            [*command, sys.executable, tmp_path / "child.py", *arguments], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(process)
        wait_for(lambda: log.exists() and "ready" in log.read_text())
        return process, log

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def child_of(process: subprocess.Popen) -> int:
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def test_interrupt_is_passed_on(interrupted):
    process, log = interrupted()
    session = child_of(process)
    process.send_signal(signal.SIGINT)
    shown = process.stdout.read()
    assert process.wait(timeout=30) == 7, "the status is the child's"
    assert "asked to stop" in log.read_text() and "stopped by SIGINT" in shown and "a second Ctrl-C kills" in shown
    assert session_members(session) == []


def test_second_interrupt_kills(interrupted):
    process, log = interrupted("stubborn")
    session = child_of(process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "asked to stop" in log.read_text())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGKILL
    assert session_members(session) == []


def test_usage_without_a_command(tmp_path):
    from verl_ext.console import main

    with pytest.raises(SystemExit) as raised:
        main(["--log", str(tmp_path / "l"), "--metrics", str(tmp_path / "m")])
    assert raised.value.code == 2


def test_an_actor_that_dies_in_its_constructor_names_the_cause():
    log = """(Server pid=7) Exception raised in creation task: The actor died because of an error
(Server pid=7)   File "/site/server.py", line 1119, in _validate_configs
(Server pid=7)     raise ValueError(text)
(Server pid=7) ValueError: max_model_len (2048) should be at most 512
Traceback (most recent call last):
  File "/site/launch.py", line 3, in launch
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task
"""
    text = diagnosis(log, 1)
    assert "ValueError: max_model_len (2048) should be at most 512" in text and "server.py:1119" in text
