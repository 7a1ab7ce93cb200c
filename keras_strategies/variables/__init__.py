"""Where the parts of large variables are: partitioners, placement, served variables."""
