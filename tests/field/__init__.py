"""The field suite: tutorials, keras-hub models and training recipes as users write."""
