"""Small compiled games: MPE, matrix games, Kuhn and Leduc poker, and liar's dice."""
