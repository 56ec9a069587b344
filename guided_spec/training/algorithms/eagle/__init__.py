"""EAGLE and EAGLE-2: one decoder layer over the target's last hidden state."""
