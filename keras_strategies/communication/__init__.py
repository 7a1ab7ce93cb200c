"""Workers as communicators: what engines implement and what passes between workers."""
