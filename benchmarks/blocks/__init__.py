"""Block heads beside a chain: trained alike, widened alike, and measured on the same documents."""
