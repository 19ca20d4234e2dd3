"""Grid games for teams of language agents."""
