"""A small stock language model, distilled from the target."""
