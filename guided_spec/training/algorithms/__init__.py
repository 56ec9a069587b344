"""Training algorithms: their modules, and in ``options`` what each is told."""
