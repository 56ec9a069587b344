"""The command line: ``guided-spec generate | proposers | check | bench``."""
