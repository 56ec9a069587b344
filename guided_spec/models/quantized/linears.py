"""Linear layers that keep quantized weights: all kinds there are."""

from __future__ import annotations

from guided_spec.models.quantized.fp8 import Fp8Linear
from guided_spec.models.quantized.int4 import Int4Linear

QuantizedLinear = Fp8Linear | Int4Linear
QUANTIZED = (Fp8Linear, Int4Linear)
