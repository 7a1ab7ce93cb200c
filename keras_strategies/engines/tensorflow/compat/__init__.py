"""All that this package uses of TensorFlow beyond its public interface, by subject.

Tested with TensorFlow 2.21. `PRIVATE_NAMES` of a file has a row for each name that it
uses; `tests/keras_compat/test_manifest.py` fails if one is missing in the installed
version.
"""
