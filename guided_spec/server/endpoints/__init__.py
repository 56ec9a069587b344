"""What the paths of the interface take and answer: bodies, replies, and what runs between."""
