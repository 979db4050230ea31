"""The processes of a search: started, asked, and what it means if they die."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
from typing import Any

import keras

from keras_mixprec.analysis.largest_batch.child import SCARCE, serve
from keras_mixprec.analysis.largest_batch.training import Job

# What the system ends a process with if memory runs out, and nobody else does;
# and what happens to one that is limited where a library does not check that it
# got what it asked for, as oneDNN in TensorFlow.
_KILLED = ("SIGKILL",)
_KILLED_IF_LIMITED = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT")

# Characters of what a dead process has printed last.
_LAST = 2000

_SECONDS_TO_END = 30


class Trials:
    """Tries sizes, each in a process in which none has failed.

    What succeeds next to what is left of other sizes does so without it; what
    fails is tried once more in a new process.

    Args:
        job: The `Job`.
        timeout: Float. Seconds that a trial may take.
    """

    def __init__(self, job: Job, timeout: float):
        self._job = pickle.dumps(job)
        self._timeout = timeout
        self._process: Any = None
        self._connection: Any = None
        self._output = ""
        # Whether the system limits what a process has: asked for, or said by
        # one that has trained.
        self._limited = job.memory_limit is not None

    def run(self, size: int) -> dict:
        """Returns what `Trainer.run` does, or why memory has run out.

        Args:
            size: Int. Samples of the batch.

        Raises:
            Exception: What the trial raised, if it is anything else.
            TimeoutError: If it takes too long.
        """
        used = self._process is not None
        found = self._ask("run", size)
        if found["fits"]:
            self._limited = found.pop("limited")
            return found
        self.close()
        return self.run(size) if used else found

    def asked(self) -> dict[str, str]:
        """Returns what `Trainer.asked` does.

        Raises:
            Exception: What the process raised.
        """
        return self._ask("asked")

    def predict(self, size: int) -> int | None:
        """Returns what `Trainer.predict` does, `None` if it fails as well."""
        try:
            found = self._ask("predict", size)
        except Exception:
            return None
        if isinstance(found, dict):  # Compiling has taken all memory.
            self.close()
            return None
        return found

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None:
            return
        # It has nothing to save, and would take seconds to end by itself.
        self._process.kill()
        self._process.join()
        self._connection.close()
        os.unlink(self._output)
        self._process = None

    def _ask(self, what, *size):
        if self._process is None:
            self._start()
        with contextlib.suppress(OSError):  # It has died already.
            self._connection.send((what, *size))
        if not self._connection.poll(self._timeout):
            self.close()
            raise TimeoutError(
                f"A trial{_with(size)} takes longer than {self._timeout:g} "
                "seconds: raise `timeout`, or lower `max_size`."
            )
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            answer = self._how_it_died(size)
        if isinstance(answer, dict) and "error" in answer:
            self.close()
            answer["error"].add_note(answer["traceback"])
            raise answer["error"]
        return answer

    def _start(self):
        file, self._output = tempfile.mkstemp(prefix="largest_batch")
        os.close(file)
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        arguments = other, self._output, self._job, keras.backend.backend()
        # No daemon: these may not have workers that read data.
        self._process = context.Process(target=serve, args=arguments)
        self._process.start()
        other.close()

    def _how_it_died(self, size):
        self._process.join(_SECONDS_TO_END)
        status = self._process.exitcode or 0
        with open(self._output, errors="replace") as file:
            printed = file.read()[-_LAST:]
        how = name = f"its process ended with status {status}"
        if status < 0:
            name = signal.Signals(-status).name
            how = f"its process was killed by {name}"
        # Such as what C++ prints of an exception that nobody catches.
        scarce = any(words in printed.lower() for words in SCARCE)
        kills = _KILLED_IF_LIMITED if self._limited else _KILLED
        if scarce or name in kills:
            return {"fits": False, "because": how}
        # Of what a process runs before `serve`, it prints itself; it ends so if
        # the script that it imports starts another one.
        if status == 1 and not printed:
            how += " before it was asked; call it below `if __name__ == "
            how += "'__main__':`, since it imports the script once more"
        error = RuntimeError(f"In a trial{_with(size)} {how}.")
        last = (
            f"It printed last:\n{printed}" if printed else "It printed nothing."
        )
        return {"error": error, "traceback": last}


def _with(size):
    return f" with {size[0]} samples" if size else ""
