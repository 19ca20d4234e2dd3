"""Games as tables: pure functions of payoffs, one array [m_0, ..., m_n-1] for each of n players."""
