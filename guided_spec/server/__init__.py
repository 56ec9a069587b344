"""An HTTP server with OpenAI's interface, over one ``LLM``. It needs the extra ``serve``."""
