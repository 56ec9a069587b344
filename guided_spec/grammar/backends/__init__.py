"""Grammar backends: xgrammar, llguidance, and the choice between them."""
