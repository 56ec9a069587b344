"""What drafts are trained on: records into tokens, tokens into batches, and masks next to them."""
