"""Training algorithms: their modules, and the options of each in ``options``."""
