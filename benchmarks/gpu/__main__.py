"""The command line; see `docs/CONTRIBUTING.md`."""

import argparse
import importlib.util
import pathlib

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.run import end_with_this_process, run

_BACKENDS = ("torch", "jax", "tensorflow")


def main():
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="in all, at most"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=_BACKENDS,
        default=[b for b in _BACKENDS[:2] if importlib.util.find_spec(b)],
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("gpu"), metavar="DIR"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with what --out has"
    )
    parser.add_argument(
        "--cases", nargs="+", default=[], help="of the zoo, instead of all"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that a CPU does in seconds"
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="all in this process, on its backend, however long that takes",
    )
    given = parser.parse_args()
    folder = given.out.absolute()
    if (folder / "gpu.jsonl").exists() and not given.resume:
        parser.error(
            f"{folder} has results. Add --resume to go on with them, or name "
            "another folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    end_with_this_process()
    run(
        folder,
        given.parts,
        [_active()] if given.here else given.backends,
        given.minutes,
        given.tiny,
        given.cases,
        given.here,
    )
    print((folder / "gpu.md").read_text())


def _active():
    import keras

    return keras.backend.backend()


if __name__ == "__main__":
    main()
