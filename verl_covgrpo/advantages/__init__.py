"""Methods that reweight advantages: one file per paper, pure torch, no verl."""
