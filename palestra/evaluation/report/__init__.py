"""The HTML report on a run: one self-contained page with curves, tables and sample episodes."""
