"""Drawn receipts, forms and tables, and the small model that reads them."""
