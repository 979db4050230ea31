"""What `process.py` starts: examines a backend, and reports it as JSON."""

import json
import sys
import traceback

from keras_mixprec.analysis.doctor.no_backend import (
    configured_backend,
    without_backend,
)
from keras_mixprec.analysis.doctor.timing import first_line


def main() -> None:
    """Prints lines of JSON: what is done, and the report at the end."""
    quick = "--quick" in sys.argv
    _print(progress=f"importing {configured_backend()}")
    try:
        # Imports Keras, and so the backend.
        from keras_mixprec.analysis.doctor.examine import examine

        report = examine(quick, lambda line: _print(progress=line))
    except Exception as error:
        traceback.print_exc()
        name, text = configured_backend(), first_line(error)
        # Not what a backend in turn imports, which its own installation lacks.
        missing = getattr(error, "name", None) in (name, "keras")
        status = "missing" if missing else "broken"
        report = without_backend(name, status, text, quick)
    _print(report=report.to_dict())


def _print(**message):
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
