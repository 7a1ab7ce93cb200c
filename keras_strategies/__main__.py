"""`python -m keras_strategies`, the same as the command `keras-strategies`."""

import sys

from keras_strategies.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
