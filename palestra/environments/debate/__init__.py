"""Two debaters, judged by rules, by a seat or by an endpoint."""
