"""Memory that one process holds and others map."""
