"""Where a population's tasks are done: in this process, in others on this machine, on a Ray cluster."""
