"""`saccade bench`: named workloads, run the way users run them, with every sample in a JSON document."""
