"""Tabular solution of small games by full enumeration: expected returns, best responses, exploitability, equilibria."""
