"""The command `wane import`, and the measurement of how fast an imported graph forgets."""
