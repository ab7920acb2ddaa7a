"""`saccade plan`: how much traffic fits on a machine and its latencies, simulated on the real scheduler."""
