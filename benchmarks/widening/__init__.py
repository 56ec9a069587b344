"""The bundled models in the shape of an 8B Llama."""
