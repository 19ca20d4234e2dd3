"""From a config to the plan, the workers and the games of a population."""
