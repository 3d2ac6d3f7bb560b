"""A weight synchronisation that fails must raise, not hang.

verl 0.9.1 sends the actor's weights to vLLM bucket by bucket over a ZMQ REQ socket and waits for each acknowledgement
without a bound (``bucketed_weight_transfer.py:136-197``). It starts the receiving side as a Ray call but looks at that
call's result only after the last acknowledgement (``vllm_rollout.py:229-244``): when ``load_weights`` raises in vLLM,
no acknowledgement comes and nobody reads the exception. Here the sender waits for its socket *and* that call.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import zmq

TIMEOUT_VARIABLE = "VERL_EXT_WEIGHT_SYNC_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0
POLL_MS = 200  # how soon a failure of the receiver is noticed; an acknowledgement wakes the sender at once

# The receiving call that belongs to the transfer now going on in this task.
receiver: ContextVar[Future | None] = ContextVar("weight_sync_receiver", default=None)


class WeightSyncError(RuntimeError):
    """The rollout engine did not take the actor's weights."""


def timeout_s() -> float:
    """Longest wait for one acknowledgement [s], from ``VERL_EXT_WEIGHT_SYNC_TIMEOUT_S``.

    Raises:
        ValueError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r}: expected seconds as a positive number, such as 300")
    return value


class WatchedSocket:
    """The sender's socket; each wait ends with the receiver's own exception or at the time-out.

    Args:
        socket: connected or bound ZMQ socket; owned by this object from now on.
        call: result of the receiving call, None on ranks that do not hold it.
        timeout: longest wait [s].
    """

    def __init__(self, socket: zmq.Socket, call: Future | None, timeout: float):
        self._socket, self._call, self._timeout = socket, call, timeout

    def wait_for(self, event: int, what: str) -> None:
        """Block until the socket is ready.

        Raises:
            WeightSyncError: the receiver failed or ended, or the time is over.
        """
        deadline = time.monotonic() + self._timeout
        while not self._socket.poll(POLL_MS, event):
            if self._call is not None and self._call.done():
                if error := self._call.exception():
                    cause = str(error).strip().splitlines() or [type(error).__name__]  # Ray prepends the traceback
                    raise WeightSyncError(f"the rollout engine failed as it loaded weights: {cause[-1]}") from error
                if self._socket.poll(POLL_MS, event):  # it answered and ended between the two looks
                    return
                raise WeightSyncError(f"the rollout engine ended its weight update and did not {what}")
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"the rollout engine did not {what} within {self._timeout:g} s. It may be stuck or dead: see its "
                    f"log in Ray's session folder; on a slow machine raise {TIMEOUT_VARIABLE}"
                )

    def send_pyobj(self, obj: Any) -> None:
        self.wait_for(zmq.POLLOUT, "connect")
        self._socket.send_pyobj(obj)

    def recv(self) -> bytes:
        self.wait_for(zmq.POLLIN, "acknowledge a bucket of weights")
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=0)
