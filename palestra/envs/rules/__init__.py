"""Rules of turn-based games, which solvers can walk through."""
