"""Where problems come from and how answers are judged: generators of our own, files, reasoning-gym."""
