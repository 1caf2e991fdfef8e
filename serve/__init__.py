"""An HTTP server over one engine: OpenAI's surface, Triton's, metrics and a page. A client of the executor, no more."""
