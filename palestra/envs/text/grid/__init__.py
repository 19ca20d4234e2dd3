"""Plan-Path and Sokoban as text, for one agent or a team."""
