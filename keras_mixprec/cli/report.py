"""`keras-mixprec report`: prints a monitor's log."""

from keras_mixprec.cli.options import Command
from keras_mixprec.formats import printable

_OPTIONS = {
    "log_dir": "the folder given to MixPrecMonitor, or a folder above it",
    "--png": {
        "default": None,
        "help": "also write a picture to this file (needs matplotlib)",
    },
}


def _run(arguments):
    from keras_mixprec.reporting.report import load_report

    report = load_report(arguments.log_dir)
    print(report)
    for path, save in (
        (arguments.html, report.save_html),
        (arguments.png, report.save_png),
    ):
        if path:
            save(path)
            print(printable(f"\nWritten: {path}"))
    found = {run["headline"]["state"] for run in report.to_dict().values()}
    return 1 if found & {"failing", "severe"} else 0


COMMAND = Command(
    _run,
    _OPTIONS,
    "html",
    "print a monitor's log",
    "Prints the log of MixPrecMonitor: loss scale, skipped steps, dtypes, "
    "verdicts, and the changes that the tuner made.",
    fails="a run fails or has a severe fault",
)
