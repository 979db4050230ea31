"""The processes of a search: started, asked, and what it means if they die."""

import keras

from keras_mixprec.analysis.isolated import EndedError, Isolated
from keras_mixprec.analysis.largest_batch.trainer import Job, serve

# What C++ and Python print before a lack of memory ends the process; a thread
# needs memory for its stack.
_SCARCE = (
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to allocate",
    "memoryerror",
    "out of memory",
    "out_of_memory",
    "resource_exhausted",
    "oom when allocating",
    "bad_alloc",
    "pthread_create",
)

# What the system ends a process with if memory runs out, and nobody else does;
# and what happens to one that is limited where a library does not check that it
# got what it asked for, as oneDNN in TensorFlow.
_KILLED = ("SIGKILL",)
_KILLED_IF_LIMITED = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT")


class Trials:
    """Tries sizes, each in a process in which none has failed.

    What succeeds next to what is left of other sizes does so without it; what
    fails is tried once more in a new process.

    Args:
        job: The `Job`.
        timeout: Float. Seconds that a trial may take.
    """

    def __init__(self, job: Job, timeout: float):
        self._job = job
        self._timeout = timeout
        self._process: Isolated | None = None
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

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            # It has nothing to save, and would take seconds to end by itself.
            self._process.close()
            self._process = None

    def _ask(self, what, *size):
        if self._process is None:
            backend = keras.backend.backend()
            self._process = Isolated(serve, (self._job,), KERAS_BACKEND=backend)
        try:
            answer = self._process.ask((what, *size), self._timeout)
        except TimeoutError:
            self.close()
            raise TimeoutError(
                f"A trial{_with(size)} takes longer than {self._timeout:g} "
                "seconds: raise `timeout`, or lower `max_size`."
            ) from None
        except EndedError as ended:
            answer = self._why_it_ended(ended, size)
        if "error" in answer:
            self.close()
            answer["error"].add_note(answer["traceback"])
            raise answer["error"]
        return answer

    def _why_it_ended(self, ended, size):
        how, printed = str(ended), ended.printed
        # Such as what C++ prints of an exception that nobody catches.
        scarce = any(words in printed.lower() for words in _SCARCE)
        kills = _KILLED_IF_LIMITED if self._limited else _KILLED
        if scarce or ended.signal in kills:
            return {"fits": False, "because": how}
        # A script that the process imports, and that starts another one, is
        # all that ends it before it prints.
        if ended.status == 1 and not printed:
            how += " before it was asked; call it below `if __name__ == "
            how += "'__main__':`, since it imports the script once more"
        error = RuntimeError(f"In a trial{_with(size)} {how}.")
        last = f"It printed last:\n{printed or 'nothing'}"
        return {"error": error, "traceback": last}


def _with(size):
    return f" with {size[0]} samples" if size else ""
