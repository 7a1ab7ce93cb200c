"""Files and messages: what Keras saves, loads and pickles."""
