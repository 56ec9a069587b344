"""Training algorithms, one folder each: its options in ``config``, its module in ``core``."""
