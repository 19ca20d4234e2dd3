"""Tabular solvers for small games: tree, best response, counterfactual regret minimisation, double oracle."""
