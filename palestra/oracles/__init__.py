"""Workers of a population: they train best responses, play members against each other, and measure NashConv exactly."""
