"""The Python API, as `import palestra` offers it: training, finished runs and configs as objects."""
