"""`keras-mixprec doctor`: what the machine can do in 16 bits."""

from keras_mixprec.analysis.doctor.process import run_in_process
from keras_mixprec.analysis.doctor.run import show
from keras_mixprec.cli import options

_EPILOG = """\
example:
  keras-mixprec doctor --backend torch --quick

exit status:
  0  no error was found.
  1  an error was found. A backend is missing or broken, results are wrong, a
     GPU is not used, or the versions do not work together.
  2  usage error.
"""


def add_command(commands) -> None:
    """Adds the command to the parser's.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = options.add_command(
        commands,
        "doctor",
        _run,
        ("json", "backend"),
        help="examine the machine and measure what 16 bits bring on it",
        description="Lists devices, number formats, versions and what is known "
        "to be bad, checks the results of each format, and times each against "
        "float32. Progress goes to stderr.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take seconds rather than half a minute",
    )
    parser.add_argument(
        "--issue",
        action="store_true",
        help="print it as a block to paste into an issue",
    )


def _run(arguments):
    report = run_in_process(arguments.backend, arguments.quick, show)
    text = report.to_json() if arguments.json else str(report)
    print(f"```\n{text}\n```" if arguments.issue else text)
    return 0 if report.ok else 1
