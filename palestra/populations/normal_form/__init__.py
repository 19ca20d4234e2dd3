"""Normal-form games: pure functions of payoffs, one float64 array [m_0, ..., m_n-1] for each of n players."""
