"""Many prompts: made of rows, some in flight at a time, and a bar of how far they are."""
