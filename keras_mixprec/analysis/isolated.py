"""Functions that run in a new process or thread and answer messages.

If the process is killed, the caller goes on, and learns how it ended and what
it printed last. This file does not import Keras, because the backend may be
broken.
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

# Characters of the last output of a process.
_LAST = 2000

# A process needs seconds to end. After that it is killed.
SECONDS_TO_END = 30


class EndedError(Exception):
    """A process has ended before it answered. The message says how.

    Attributes:
        signal: String, the name of the signal that killed it, or `""`.
        status: Int, the exit status.
        printed: String, its last output.
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
    """A function in a new thread, and a connection to it.

    Args:
        target: Function `(connection, *args)`.
        args: Tuple.
    """

    def __init__(self, target: Callable, args: tuple):
        self._connection, other = multiprocessing.Pipe()
        self._running: Any = threading.Thread(
            target=target, args=(other, *args), daemon=True
        )
        self._running.start()

    def send(self, message: Any) -> None:
        """Sends a message. It is lost if the other side has ended."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self, timeout: float | None = None) -> Any:
        """Returns the next message.

        Args:
            timeout: Float. Seconds to wait. Defaults to `None`: any time.

        Raises:
            EndedError: If the other side has ended.
            TimeoutError: If the message takes longer.
        """
        if not self._connection.poll(timeout):
            raise TimeoutError
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None

    def ask(self, message: Any, timeout: float | None = None) -> Any:
        """Sends a message, and returns the answer, as `receive` does."""
        self.send(message)
        return self.receive(timeout)

    def close(self, seconds: float = 0.0) -> None:
        """Waits at most so long for its end, and closes the connection."""
        self._running.join(seconds)
        self._connection.close()

    def _ended(self):
        return EndedError(0, "")


class Isolated(Threaded):
    """A function in a new process, and a connection to it.

    Args:
        target: Function `(connection, *args)` at the top of a module.
        args: Tuple.
        imports_main: Boolean. If `True`, the process imports the caller's
            script, so that it finds functions of the script. Defaults to
            `True`.
        **environment: Strings. Environment variables of the process.
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
        # Not a daemon, because a daemon may not start workers that read data.
        # The process unpickles it after redirecting its output, so that an
        # error is recorded.
        job = pickle.dumps((target, args))
        self._running = context.Process(
            target=_run, args=(self._output, other, job)
        )
        with _started_with(environment, imports_main):
            self._running.start()
        other.close()

    def close(self, seconds: float = 0.0) -> None:
        """Waits at most so long for its end, then kills it."""
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
    """Context that sets environment variables for new processes."""
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
