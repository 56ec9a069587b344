"""Tools of this repository that users of the package do not need."""
