"""Runs the tasks of a population: training best responses, playing members, exact evaluation."""
