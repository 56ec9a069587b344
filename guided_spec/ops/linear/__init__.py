"""Products with weights that are not plain: of experts, and in fp8."""
