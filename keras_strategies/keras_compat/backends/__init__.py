"""Use of Keras on one backend beyond its public interface."""
