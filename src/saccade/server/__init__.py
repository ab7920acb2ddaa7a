"""The API server: OpenAI-compatible HTTP around an input processor and an engine client; never torch."""
