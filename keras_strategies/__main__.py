"""`python -m keras_strategies`, the same as the command `keras-strategies`."""

import sys

from keras_strategies.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
