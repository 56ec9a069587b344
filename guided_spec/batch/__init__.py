"""Files of requests: answered by one process, a line for each, and gone on with after a stop."""
