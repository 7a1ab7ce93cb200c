"""`python -m keras_strategies`, the same as `keras-strategies`."""

import sys

from keras_strategies.cli import main

if __name__ == "__main__":
    sys.exit(main())
