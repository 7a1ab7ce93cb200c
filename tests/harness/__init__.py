"""What the tests share: data, models, strategies, leak police."""
