"""palestra: train language agents and small networks together, in teams, in games and as populations.

Import what you need from the modules (`palestra.envs.base`, `palestra.config`, ...): this package imports nothing, so
that `palestra --help` answers at once.
"""

__version__ = "0.1.0"
