"""The paths of the interface: their bodies, their replies, and what runs in between."""
