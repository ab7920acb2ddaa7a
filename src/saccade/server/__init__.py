"""The wire: OpenAI's HTTP interface around a front and an engine link.

takes   HTTP requests
gives   JSON and server-sent events, or an OpenAI-style error that names the parameter
owns    the routes, the limits of a request, the drain
never   imports torch; decodes a picture or chooses a token
"""
