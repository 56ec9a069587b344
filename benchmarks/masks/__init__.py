"""What masks cost who decodes, and what saves that."""
