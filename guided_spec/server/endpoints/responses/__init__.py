"""``/v1/responses``: a response, the items that it is made of, and their shapes."""
