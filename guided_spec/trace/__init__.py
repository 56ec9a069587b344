"""What speculation did, token by token: recorded in the engine, shown as a page."""
