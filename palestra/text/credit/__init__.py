"""Credit of answers: advantages of groups and turns, GAE, importance weights."""
