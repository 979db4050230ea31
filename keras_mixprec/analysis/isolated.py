"""Runs functions in a new process or thread, and exchanges messages with them.

If the process is killed, the caller gets an error with the signal and the last
output. This file does not import Keras, because the backend may be broken.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from typing import Any

# The maximum number of characters of output that `EndedError.printed` keeps.
_LAST = 2000

# The number of seconds that a process has to exit before it is killed. A
# process that has imported a backend takes several seconds to exit.
SECONDS_TO_END = 30


class EndedError(Exception):
    """Raised if a process ends before it answers.

    Attributes:
        signal: String, the name of the signal that killed the process, or
            `""`.
        status: Int, the exit status.
        printed: String, the last output of the process.
    """

    def __init__(self, status: int, printed: str):
        self.signal = signal.Signals(-status).name if status < 0 else ""
        self.status = status
        self.printed = printed
        super().__init__(
            f"its process was killed by {self.signal}"
            if self.signal
            else f"its process ended with status {status}"
        )


class Threaded:
    """Runs a function in a new thread, and exchanges messages with it.

    Args:
        target: Function `(connection, *args)`.
        args: Tuple of further arguments.
    """

    def __init__(self, target: Callable, args: tuple):
        self._connection, other = multiprocessing.Pipe()
        self._running: Any = threading.Thread(
            target=target, args=(other, *args), daemon=True
        )
        self._running.start()

    def send(self, message: Any) -> None:
        """Sends a message, which is lost if the other side has ended."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self, timeout: float | None = None) -> Any:
        """Returns the next message.

        Args:
            timeout: Float. Seconds to wait. Defaults to `None`: no limit.

        Raises:
            EndedError: If the other side has ended.
            TimeoutError: If no message arrives in time.
        """
        if not self._connection.poll(timeout):
            raise TimeoutError
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def ask(self, message: Any, timeout: float | None = None) -> Any:
        """Sends a message and returns the answer, as `receive` does."""
        self.send(message)
        return self.receive(timeout)

    def close(self, seconds: float = 0.0) -> None:
        """Waits up to `seconds` for the thread, and closes the connection."""
        self._running.join(seconds)
        self._connection.close()

    def _ended(self):
        return EndedError(0, "")


class Isolated(Threaded):
    """Runs a function in a new process, and exchanges messages with it.

    Args:
        target: Function `(connection, *args)` at the top of a module.
        args: Tuple of further arguments.
        imports_main: Boolean. If `True`, the process imports the caller's
            script, so that `target` and `args` may use functions from it.
            Defaults to `True`.
        **environment: Strings. Environment variables for the process.
    """

    def __init__(
        self,
        target: Callable,
        args: tuple,
        imports_main: bool = True,
        **environment: str,
    ):
        file, self._output = tempfile.mkstemp(prefix="keras_mixprec")
        os.close(file)
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        # Pickle the job separately, so that the new process can redirect its
        # output before it unpickles the job. Otherwise, errors of unpickling
        # would be lost.
        job = pickle.dumps((target, args))
        # The process is not a daemon, because daemons may not start processes
        # that load data.
        self._running = context.Process(
            target=_run, args=(self._output, other, job)
        )
        with _started_with(environment, imports_main):
            self._running.start()
        other.close()

    def close(self, seconds: float = 0.0) -> None:
        """Waits up to `seconds` for the process to end, then kills it."""
        self._running.join(seconds)
        if self._running.is_alive():
            self._running.kill()
            self._running.join()
        self._connection.close()
        os.unlink(self._output)

    def _ended(self):
        self._running.join(SECONDS_TO_END)
        with open(self._output, errors="replace") as file:
            printed = file.read()[-_LAST:]
        return EndedError(self._running.exitcode or 0, printed)


def _run(output, connection, job):
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    target, args = pickle.loads(job)
    target(connection, *args)


@contextlib.contextmanager
def _started_with(environment, imports_main):
    """Context in which new processes get more environment variables."""
    main = sys.modules["__main__"]
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    if not imports_main:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
