"""Parameter servers: asynchronous training with variables on servers."""
