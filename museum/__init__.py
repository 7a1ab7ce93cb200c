"""Published bugs of distributed training that gave wrong numbers without an error."""
