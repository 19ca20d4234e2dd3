"""Switches of compilers and libraries: Numba, oneDNN, malloc, and the devices of torch."""
