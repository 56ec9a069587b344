"""Everything that measures this package; not part of the wheel."""
