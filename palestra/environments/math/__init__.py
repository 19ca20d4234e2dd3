"""Mathematical problems, generated or from files, for solvers with checkers and tools; answers are graded by value."""
