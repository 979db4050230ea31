"""Runs the `keras-mixprec` command for `python -m keras_mixprec`."""

import sys

from keras_mixprec.cli import main

sys.exit(main())
