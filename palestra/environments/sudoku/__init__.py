"""Sudoku as text: grids with one solution, for one agent, or for a proposer and a checker."""
