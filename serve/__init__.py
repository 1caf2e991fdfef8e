"""An HTTP server over one executor: OpenAI's API, Triton's API, metrics and a web page."""
