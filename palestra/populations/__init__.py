"""Populations: members that train against each other, their payoffs, and the plans that choose who plays whom."""
