"""Reward for mathematical answers: right in threads and bounded in time.

Use it in any verl run::

    reward.custom_reward_function.path=pkg://verl_ext.rewards
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.strict_box=True      # optional, see compute_score

The answer is taken from the response, cleaned, and compared with the reference: plain text and integers here, all else
by math-verify. math-verify bounds itself with ``signal.alarm``, which raises in a thread (where verl calls rewards) and
cannot interrupt one long C call such as a huge power. So it runs without its own time-outs in a small worker process
that ends when its time is over; the next call starts a new one. A worker is a fresh interpreter that imports
math-verify only (about 70 MB, half a second): nothing is forked from a process that holds torch, Ray or gRPC threads.

What counts as equal is math-verify's default, with these additions: currency signs are dropped; ``3 1/2`` and ``1.5e3``
are numbers; beside a percentage such as ``50%`` both 50 and 0.5 are right; text is compared as text, without case
(math-verify reads unmarked words as products of letters: "east" would equal "seat"). Known limits, math-verify's own:
units are ignored (``5 cm`` equals ``5 m``), an open interval and a list of its ends are equal, of an equation only the
right side counts, so ``3 = 2`` equals 2.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import re
import signal
import subprocess
import sys
from collections import deque
from decimal import Decimal
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from numbers import Real

logger = logging.getLogger(__name__)

TIME_LIMIT = 5.0  # seconds of processor time for one comparison
WALL_FACTOR = 3.0  # a comparison ends after this many times its limit, however busy the machine is
MAX_CHARS = 20_000  # only the end of a response is searched
MAX_ANSWER_CHARS = 1_000  # the longest answer in MATH has 139; parsing time grows steeply with nesting
WORKERS = 2  # worker processes per calling process, started when needed
WORKER_MEMORY = 4 << 30  # bytes of address space of a worker
START_LIMIT = 120.0  # seconds for a worker to import math-verify, on a busy machine

_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MONEY = r"(?:\\?[$€£])?"
_HASHES = re.compile(
    # "#### 72", "#### $1,200", "#### 5 apples."; not "#### Step 1", "#### 1. First"
    rf"####[ \t]*(-?[ \t]*{_MONEY}{_NUMBER}(?:/\d+)?(?:[ \t]*\\?%)?)(?:[ \t]+[A-Za-z]+)?[ \t]*\.?[ \t]*$",
    re.MULTILINE,
)
_LAST = re.compile(
    # "-" is a sign only if nothing to subtract from stands before it
    rf"((?:(?<![\w.)\]}}])-)?{_MONEY}"
    rf"(?:\\[dt]?frac\{{\d+\}}\{{\d+\}}|(?<![\w.])(?:\d+ \d+/\d+|{_NUMBER}(?:[eE][+-]?\d+|/\d+)?)(?:\s?\\?%)?))"
)
_NUMERIC = re.compile(r"-?[\d.]")
_PLAIN = re.compile(r"-?\d{1,60}(?:\.\d{1,60})?")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_MARKED_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z]{4,}(?:[ '-][A-Za-z]+)*")  # shorter ones may be products such as ab


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int | float,
    extra_info: dict | None = None,
    *,
    strict_box: bool = False,
    time_limit: float = TIME_LIMIT,
    max_chars: int = MAX_CHARS,
    **verl_kwargs,
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: name of the data set; not used, every source is scored alike.
        solution_str: the response without its prompt, as verl passes it.
        ground_truth: the reference answer, without a box.
        extra_info: the row's extra information; not used (it may hold the worked solution).
        strict_box: accept an answer in ``\\boxed{}`` only.
        time_limit: processor seconds for one comparison, so that a busy machine turns no right answer into a wrong
            one; at most ``WALL_FACTOR`` times as long passes. Waiting for a free worker and starting one come on top.
        max_chars: characters at the end of the response that are searched.
        verl_kwargs: ``reward_router_address`` and ``reward_model_tokenizer``, which verl adds when a reward model runs.

    Returns:
        The same keys for every row, each 0.0 or 1.0: ``score`` and ``acc`` (right), ``parsed`` (an answer was found
        and judged; wrong = parsed - acc), ``timed_out`` (an answer was found but not judged within time and memory).

    Raises:
        TypeError, ValueError: an argument is unusable; the message names it.
        RuntimeError: math-verify cannot be started.
    """
    unknown = set(verl_kwargs) - {"reward_router_address", "reward_model_tokenizer"}
    if unknown:
        raise TypeError(
            f"reward.custom_reward_function.reward_kwargs: unknown {sorted(unknown)}; "
            f"known are strict_box, time_limit, max_chars"
        )
    if not isinstance(solution_str, str):
        raise TypeError(f"solution_str must be text, got {type(solution_str).__name__}")
    if not isinstance(strict_box, bool):
        raise TypeError(f"reward_kwargs.strict_box must be true or false, got {strict_box!r}")
    if isinstance(time_limit, bool) or not isinstance(time_limit, Real) or not 0 < time_limit < math.inf:
        raise ValueError(f"reward_kwargs.time_limit must be a positive number of seconds, got {time_limit!r}")
    if isinstance(max_chars, bool) or not isinstance(max_chars, int) or max_chars < 1:
        raise ValueError(f"reward_kwargs.max_chars must be a positive number of characters, got {max_chars!r}")
    gold = _reference(ground_truth)

    answer = extract_answer(solution_str[-max_chars:], strict_box=strict_box)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return _result(parsed=False)
    try:
        return _result(right=_equal(gold, answer, float(time_limit)))
    except TimeoutError as error:
        logger.warning("%s; scored 0: %.80r", error, answer)
        return _result(parsed=False, timed_out=True)


def extract_answer(response: str, strict_box: bool = False) -> str | None:
    """The final answer in ``response``, or None.

    The last ``\\boxed{}`` counts (if it is not closed, the response was cut off: None). Without any box: the last line
    ``#### <number>``, else the last number, unless ``strict_box``. Headings such as ``#### Step 1`` are no answer.
    """
    box = _last_match(_BOX, response)
    if box:
        return _closed_group(response, box.end())
    if strict_box:
        return None
    response = response.replace("\u2212", "-")
    found = _last_match(_HASHES, response) or _last_match(_LAST, response)
    return found[1].strip() if found else None


def canonical_answer(ground_truth: str | int | float | list) -> str:
    """The reference as a response would write it: without box, dollar signs, final dot and grouping; `\\frac` for
    `\\dfrac`. Of several references the first.

    Raises:
        TypeError, ValueError: there is no answer in it.
    """
    if isinstance(ground_truth, list | tuple) and ground_truth:
        ground_truth = ground_truth[0]
    text = _reference(ground_truth)
    box = _last_match(_BOX, text)
    text = (_closed_group(text, box.end()) if box else None) or text
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text.replace("\\$", "").strip(" $").removesuffix(".").rstrip())
    text = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    if not text:
        raise ValueError(f"reward_model.ground_truth is {ground_truth!r}; nothing of it is left to ask for")
    return text


def _last_match(pattern: re.Pattern, text: str) -> re.Match | None:
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def _closed_group(text: str, start: int) -> str | None:
    """The stripped text from ``start`` to the brace that closes the group opened before it; None if none or empty."""
    depth = 1
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":  # \{ and \} are characters, not groups
            position += 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[start:position].strip() or None
        position += 1
    return None


def _result(right: bool = False, parsed: bool = True, timed_out: bool = False) -> dict[str, float]:
    return {"score": float(right), "acc": float(right), "parsed": float(parsed), "timed_out": float(timed_out)}


def _reference(ground_truth) -> str:
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | Real):
        kind = type(ground_truth).__name__
        raise TypeError(f"reward_model.ground_truth must be text or a number, got {kind}: {ground_truth!r}")
    gold = str(ground_truth).strip()
    if not gold or gold == "nan":
        raise ValueError(f"reward_model.ground_truth is {ground_truth!r}; a row without an answer cannot be scored")
    return gold


def _clean(text: str) -> str:
    """Bring the notations of a value into one that math-verify reads; which value is meant does not change."""
    for old, new in (("\u2212", "-"), ("\\$", ""), ("{,}", ","), ("\\!", ""), ("\\%", "%"), ("°", r"^\circ")):
        text = text.replace(old, new)
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\s+", " ", text)  # a space; not the row separator of a matrix
    text = text.strip(" $€£¥").removesuffix(".").rstrip()
    text = re.sub(r"^-\s*[$€£¥]?\s*(?=[\d.])", "-", text)
    if _GROUPED.fullmatch(text):
        return text.replace(",", "")
    if _SCIENTIFIC.fullmatch(text):
        return _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    if _MIXED.fullmatch(text):
        return _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    return text


@lru_cache(maxsize=8192)  # the samples of a group often agree
def _equal(gold: str, answer: str, time_limit: float) -> bool:
    """Whether ``answer`` means ``gold``.

    Raises:
        TimeoutError: no verdict within ``time_limit`` seconds (or the worker's memory).
    """
    gold, answer = _clean(gold), _clean(answer)
    if gold == answer:
        return True
    gold_text, answer_text = _unmarked(gold), _unmarked(answer)
    if _WORDS.fullmatch(gold) or (gold_text != gold and re.match("[A-Za-z]{2}", gold_text)):
        return gold_text.casefold() == answer_text.casefold()
    if _PLAIN.fullmatch(gold_text) and _PLAIN.fullmatch(answer_text):
        if Decimal(gold_text) == Decimal(answer_text):
            return True
        if "." not in gold_text + answer_text:
            return False
    gold = gold_text if _NUMERIC.match(gold_text) else gold
    answer = answer_text if _NUMERIC.match(answer_text) else answer
    percent = "%" if gold.endswith("%") and answer.endswith("%") else ""
    return _workers.ask(_readings(gold.removesuffix(percent)), _readings(answer.removesuffix(percent)), time_limit)


def _unmarked(text: str) -> str:
    r"""The content of ``text`` if it is one ``\text{...}``, else ``text`` itself."""
    marked = _MARKED_TEXT.fullmatch(text)
    return _clean(marked[1]) if marked else text


def _readings(text: str) -> list[str]:
    """Values that ``text`` may stand for: ``50%`` is 50 (percent) or 50/100."""
    number = text.removesuffix("%").strip()
    return [text] if number == text else [number, rf"\frac{{{number}}}{{100}}"]


class _Worker:
    """One process that answers "does any of these golds equal any of these answers?"."""

    def __init__(self):
        self.connection, theirs = Pipe()
        # By path, not by module or multiprocessing: importing a package or somebody's __main__ may start anything.
        command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        failure = self._receive(START_LIMIT, default="the process ended or did not answer while starting")
        if failure:
            self.kill()
            raise RuntimeError(f"math-verify does not start: {failure}; fix: pip install math-verify==0.9.0")

    def _receive(self, limit: float, default):
        try:
            return self.connection.recv() if self.connection.poll(limit) else default
        except (EOFError, OSError):
            return default

    def ask(self, golds: list[str], answers: list[str], limit: float) -> bool | None:
        """The verdict, or None if the process gave none within ``limit`` (it is of no use afterwards)."""
        try:
            self.connection.send((golds, answers, limit))
        except OSError:
            return None
        return self._receive(limit * WALL_FACTOR, default=None)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


class _Workers:
    """At most ``size`` workers shared by all threads of this process."""

    def __init__(self, size: int):
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def ask(self, golds: list[str], answers: list[str], limit: float) -> bool:
        worker = self._slots.get()
        try:
            if worker is not None and not worker.alive:  # killed from outside since its last answer
                worker.kill()
                worker = None
            worker = worker or _Worker()
            verdict = worker.ask(golds, answers, limit)
            if verdict is None:
                raise TimeoutError(f"math-verify: no verdict within {limit:g} s and {WORKER_MEMORY >> 30} GiB")
            return verdict
        except BaseException:  # also an interrupt: a late verdict must not reach the next question
            if worker is not None:
                worker.kill()
                worker = None
            raise
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        while not self._slots.empty():
            worker = self._slots.get_nowait()
            if worker is not None:
                worker.kill()


def _new_workers() -> None:
    global _workers
    _workers = _Workers(WORKERS)


_new_workers()
# A forked child must not talk over its parent's connections.
os.register_at_fork(after_in_child=_new_workers)
atexit.register(lambda: _workers.close())


def _serve(connection: Connection) -> None:
    """Body of a worker process: start, report, answer until the other side is gone."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    memory = WORKER_MEMORY if hard == resource.RLIM_INFINITY else min(WORKER_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for timer in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    try:
        from math_verify import parse, verify
    except ImportError as error:
        connection.send(repr(error))
        return
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-outs are off

    @lru_cache(maxsize=1024)
    def expressions(text: str) -> list:
        return parse(rf"\boxed{{{text}}}", parsing_timeout=None)

    verify(expressions(r"\frac{1}{2}+x"), expressions("x+0.5"), timeout_seconds=None)  # the first one is slow
    connection.send(None)
    while True:
        try:
            golds, answers, limit = connection.recv()
        except EOFError:
            return
        # The kernel ends this process when a timer fires (Python code would not get its turn): the first is the limit,
        # the second is for the case that nobody is left to kill it.
        signal.setitimer(signal.ITIMER_PROF, limit)
        signal.setitimer(signal.ITIMER_REAL, limit * WALL_FACTOR + 1)
        gold = [expression for text in golds for expression in expressions(text)]
        answer = [expression for text in answers for expression in expressions(text)]
        verdict = verify(gold, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(bool(verdict))


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    _serve(Connection(int(sys.argv[1])))
