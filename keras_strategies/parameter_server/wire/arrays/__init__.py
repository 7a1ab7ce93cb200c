"""Arrays in messages: packing, alignment and shared memory."""
