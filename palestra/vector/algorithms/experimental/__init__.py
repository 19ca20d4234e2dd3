"""Algorithms with few users and few results here: MAT, TRPO, COMA, MAVEN, FACMAC, imitation, offline learning."""
