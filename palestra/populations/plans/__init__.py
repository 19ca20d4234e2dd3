"""Plans: who trains against whom. PSRO, double oracles, self-play, leagues, population-based training."""
