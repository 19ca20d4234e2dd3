"""Backends that run a population's tasks: in this process, in other processes on this machine, or on a Ray cluster."""
