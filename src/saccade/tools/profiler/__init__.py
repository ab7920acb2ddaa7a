"""`saccade profile`: where the time of a new image, a prompt and a decode step goes, kernel by kernel."""
