"""`python -m keras_mixprec` is `keras-mixprec`."""

import sys

from keras_mixprec.cli import main

sys.exit(main())
