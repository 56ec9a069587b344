"""Many mixed requests through one engine, and no leaks."""
