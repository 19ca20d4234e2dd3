"""Training loops, and the synchronisation of several training processes."""
