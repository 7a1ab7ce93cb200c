"""What the tests share: cases, data, models, strategies, leak police, a fake backend."""
