"""Runs the Python of README.md and docs/, each page as one program.

A plugin of pytest; tox.ini names it with `-p tests.documents`.
"""

import doctest
import os
import pathlib
import tempfile

import keras
import numpy as np
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import keras_mixprec as kmp

ROOT = pathlib.Path(__file__).parents[1]


def _enter_folder(namespace):
    folder = tempfile.TemporaryDirectory()
    namespace.update(keras=keras, np=np, kmp=kmp, _folder=folder)
    os.chdir(folder.name)
    # Each page has its own measurements.
    os.environ["KERAS_MIXPREC_CACHE_DIR"] = folder.name


def _leave_folder(namespace):
    os.chdir(ROOT)
    del os.environ["KERAS_MIXPREC_CACHE_DIR"]
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS)],
    patterns=["README.md", "docs/*.md"],
    path=str(ROOT),
    setup=_enter_folder,
    teardown=_leave_folder,
    fixtures=["_fresh_state"],
).pytest()
