"""Parameter servers, workers that they serve, and the coordinator of both."""
