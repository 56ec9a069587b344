"""The bundled model pair: its data, its tokenizer, its training and its evaluation."""
