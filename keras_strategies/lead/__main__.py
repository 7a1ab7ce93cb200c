"""Runs a lead: `python -m keras_strategies.lead SETTINGS`, see `process.py`."""

import sys

from keras_strategies.lead.process import main

if __name__ == "__main__":
    main(sys.argv[1])
