"""`keras-mixprec doctor`: checks a machine, and times it in 16 bits."""

from keras_mixprec.analysis.doctor.run import run_in_process
from keras_mixprec.cli.options import Command

_OPTIONS = {
    "--quick": {
        "action": "store_true",
        "help": "measure less, in seconds instead of half a minute",
    },
    "--issue": {
        "action": "store_true",
        "help": "print the report as a block to paste into an issue",
    },
}


def _run(arguments):
    report = run_in_process(arguments.backend, arguments.quick)
    text = report.to_json() if arguments.json else str(report)
    print(f"```\n{text}\n```" if arguments.issue else text)
    return 0 if report.ok else 1


COMMAND = Command(
    _run,
    _OPTIONS,
    "json backend",
    "check this machine, and measure its speed in 16 bits",
    "Lists devices, number formats, versions and known problems. Checks the "
    "results of each format, and times it against float32. Progress goes to "
    "stderr.",
    "keras-mixprec doctor --backend torch --quick",
    "an error was found",
)
