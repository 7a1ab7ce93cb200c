"""What the tests share: data, models, strategies, leak police, a fake backend."""
