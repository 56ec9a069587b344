"""What the site of docs/ needs besides mkdocs: links out of it, and fields in docstrings."""
