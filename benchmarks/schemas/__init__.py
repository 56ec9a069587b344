"""What becomes of real JSON schemas, and of budgets."""
