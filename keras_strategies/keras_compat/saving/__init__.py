"""Files and messages: saving, loading and pickling by Keras."""
