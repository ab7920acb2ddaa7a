"""User input to requests, and engine output to text. Never imports torch."""
