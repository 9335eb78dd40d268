"""Tools around the trainer. Only the command line calls them; the core does not depend on them."""
